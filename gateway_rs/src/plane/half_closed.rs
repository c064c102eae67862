//! Clients over HTTP/1 that have said that they will send no more (FIN) while they wait for an answer.
//!
//! One that reads on says the same as one that has gone; they differ only in what happens to what is written to them. So
//! the end is kept from the server while a request is in hand, and until the answer begins the client is told `100
//! Continue` now and then, which every client must pass over: one that has gone answers with a reset, and the next write
//! fails. What follows is written as ever, and shows by itself. HTTP/2 ends its requests one by one, so that there the end
//! of the connection is one.

use std::{
    convert::Infallible,
    future::Future,
    io,
    pin::Pin,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        Arc,
    },
    task::{ready, Context, Poll},
    time::Duration,
};

use axum::Router;
use bytes::Bytes;
use http::{Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};
use tower_service::Service;

use super::opening::Opening;

/// Passed over by whoever waits for an answer.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Between one and the next: at first little more than the way there and back, then twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What a connection and its requests know of each other.
#[derive(Default)]
struct InHand {
    /// Requests of HTTP/1.1 whose answers are not over.
    requests: AtomicUsize,
    /// Something has been written since the last of them began.
    answered: AtomicBool,
}

/// A client's connection, whose end for reading comes after what it waits for.
pub struct HalfClosed<S> {
    stream: Opening<S>,
    in_hand: Arc<InHand>,
    /// Once the client has said that it will send no more.
    probe: Option<Probe>,
    /// What has been written since it was last all on its way.
    unflushed: bool,
}

struct Probe {
    timer: Pin<Box<Sleep>>,
    pause: Duration,
}

impl<S> HalfClosed<S>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    /// The connection, and what serves its requests.
    pub fn new(stream: Opening<S>, routes: Router) -> (Self, Serve) {
        let in_hand = Arc::new(InHand::default());
        let connection = Self {
            stream,
            in_hand: in_hand.clone(),
            probe: None,
            unflushed: false,
        };
        (connection, Serve { routes, in_hand })
    }

    fn is_waiting(&self) -> bool {
        self.in_hand.requests.load(Ordering::Relaxed) > 0
    }

    /// Ready at the end, or with an error when the client has gone.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if !self.is_waiting() && !self.unflushed {
                return Poll::Ready(Ok(()));
            }
            let probe = self.probe.get_or_insert_with(|| Probe {
                timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
                pause: FIRST_PAUSE,
            });
            ready!(probe.timer.as_mut().poll(context));
            probe.timer.as_mut().reset(tokio::time::Instant::now() + probe.pause);
            probe.pause = (probe.pause * 2).min(LONGEST_PAUSE);
            if self.unflushed || self.in_hand.answered.load(Ordering::Relaxed) {
                continue;
            }
            match Pin::new(&mut self.stream).poll_write(context, INTERIM) {
                Poll::Ready(Ok(written)) if written < INTERIM.len() => {
                    // It has long not read so much as that.
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                Poll::Ready(written) => written.map(|_| ())?,
                Poll::Pending => {}
            }
            if let Poll::Ready(flushed) = Pin::new(&mut self.stream).poll_flush(context) {
                flushed?;
            }
        }
    }

    fn writes(&mut self) {
        self.unflushed = true;
        self.in_hand.answered.store(true, Ordering::Relaxed);
    }
}

impl<S> AsyncRead for HalfClosed<S>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.probe.is_none() {
            let before = buffer.filled().len();
            ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
            let is_end = buffer.filled().len() == before && buffer.remaining() > 0;
            if !is_end || !self.is_waiting() || self.stream.is_http2() {
                return Poll::Ready(Ok(()));
            }
        }
        self.poll_end(context)
    }
}

impl<S> AsyncWrite for HalfClosed<S>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.writes();
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.writes();
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(context));
        // The server flushes when it has written all that it has.
        self.unflushed = false;
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The requests of one connection.
#[derive(Clone)]
pub struct Serve {
    routes: Router,
    in_hand: Arc<InHand>,
}

impl hyper::service::Service<Request<Incoming>> for Serve {
    type Response = Response<Held>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        // At once: the client's end may be read before the answer is first asked for.
        let turn = Turn::begin(&self.in_hand, request.version());
        let answer = self.routes.clone().call(request);
        Box::pin(async move { Ok(answer.await?.map(|body| Held { body, _turn: turn })) })
    }
}

/// A request in hand, until it is dropped.
struct Turn(Option<Arc<InHand>>);

impl Turn {
    fn begin(in_hand: &Arc<InHand>, version: Version) -> Self {
        // An interim answer is for HTTP/1.1: who says the end by HTTP/1.0 is taken to have gone.
        if version != Version::HTTP_11 {
            return Self(None);
        }
        in_hand.answered.store(false, Ordering::Relaxed);
        in_hand.requests.fetch_add(1, Ordering::Relaxed);
        Self(Some(in_hand.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(in_hand) = &self.0 {
            in_hand.requests.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// An answer's body, which is over when it is dropped.
pub struct Held {
    body: axum::body::Body,
    _turn: Turn,
}

impl Body for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
