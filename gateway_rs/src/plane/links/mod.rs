//! The router's long-lived streams to the other services: one for each pair of processes, shared by all requests.
//!
//! A link never blocks a request: what a request says goes into the link's [`Outbox`], what comes back wakes the request.
//! Each link owns the life of its connection (connect, hello, retry) in one task.

pub mod cache;
pub mod scheduler;
mod shares;
pub mod worker;

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_core::Stream;
use parking_lot::Mutex;
use tonic::transport::{Channel, Endpoint, Uri};

use super::tls::Tls;
use crate::{
    error::{ApiError, ErrorCode},
    proto,
};

/// Largest message on an internal link, both ways, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;

/// A gathered message is closed at about this size, so that none comes near the limit.
const GATHER_BYTES: usize = 4 * 1024 * 1024;

impl From<proto::Error> for ApiError {
    fn from(error: proto::Error) -> Self {
        let mut ours = Self::new(ErrorCode::from_number(error.code), error.message).with_retryable(error.retryable);
        if error.retry_after_ms > 0 {
            ours = ours.with_retry_after(Duration::from_millis(error.retry_after_ms.into()));
        }
        match error.param.is_empty() {
            true => ours,
            false => ours.with_param(error.param),
        }
    }
}

/// What is to be sent next on a stream. While one message is being written, what becomes ready is gathered into the next
/// (natural batching), so a busy link sends few large messages and an idle one sends at once.
pub struct Outbox<M>(Mutex<Gathered<M>>);

struct Gathered<M> {
    messages: std::collections::VecDeque<M>,
    /// Rough size of the last message, in bytes.
    last_bytes: usize,
    waker: Option<Waker>,
    /// Outboxes outlive connections; a stream of an earlier connection must not take what belongs to the next.
    connection: u64,
    /// Sent ahead of everything on a connection.
    first: Option<M>,
    /// Nothing but `first` is sent yet.
    held: bool,
    /// What is there is the last.
    closed: bool,
}

impl<M> Default for Outbox<M> {
    fn default() -> Self {
        Self(Mutex::new(Gathered {
            messages: std::collections::VecDeque::new(),
            last_bytes: 0,
            waker: None,
            connection: 0,
            first: None,
            held: false,
            closed: false,
        }))
    }
}

impl<M: Default> Outbox<M> {
    /// Adds to the message that is sent next. `bytes` is the rough size of what is added.
    pub fn add(&self, bytes: usize, write: impl FnOnce(&mut M)) {
        let waker = {
            let mut gathered = self.0.lock();
            if gathered.messages.is_empty() || gathered.last_bytes > GATHER_BYTES {
                gathered.messages.push_back(M::default());
                gathered.last_bytes = 0;
            }
            gathered.last_bytes += bytes;
            if let Some(message) = gathered.messages.back_mut() {
                write(message);
            }
            gathered.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Starts a new connection's stream: what was gathered is handed to `rewrite`, whose result is sent first.
    pub fn open(self: &Arc<Self>, rewrite: impl FnOnce(Vec<M>) -> Vec<M>) -> Outgoing<M> {
        let mut gathered = self.0.lock();
        gathered.connection += 1;
        let old = std::mem::take(&mut gathered.messages);
        gathered.messages = rewrite(old.into()).into();
        gathered.last_bytes = GATHER_BYTES + 1;
        Outgoing {
            outbox: self.clone(),
            connection: gathered.connection,
        }
    }

    /// Starts a new connection's stream with `first`; the rest waits until it is [let go](Self::let_go).
    pub fn open_held(self: &Arc<Self>, first: M) -> Outgoing<M> {
        let mut gathered = self.0.lock();
        gathered.connection += 1;
        gathered.first = Some(first);
        gathered.held = true;
        Outgoing {
            outbox: self.clone(),
            connection: gathered.connection,
        }
    }

    /// Ends the hold of [`Self::open_held`].
    pub fn let_go(&self) {
        let waker = {
            let mut gathered = self.0.lock();
            gathered.held = false;
            gathered.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the stream after what has been added.
    pub fn close(&self) {
        let waker = {
            let mut gathered = self.0.lock();
            gathered.closed = true;
            gathered.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether the stream was meant to end.
    pub fn is_closed(&self) -> bool {
        self.0.lock().closed
    }

    /// Forgets everything that was not sent.
    pub fn clear(&self) {
        self.0.lock().messages.clear();
    }
}

/// The outgoing half of one connection.
pub struct Outgoing<M> {
    outbox: Arc<Outbox<M>>,
    connection: u64,
}

impl<M> Stream for Outgoing<M> {
    type Item = M;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<M>> {
        let mut gathered = self.outbox.0.lock();
        if gathered.connection != self.connection {
            return Poll::Ready(None);
        }
        if let Some(first) = gathered.first.take() {
            return Poll::Ready(Some(first));
        }
        if !gathered.held {
            if let Some(message) = gathered.messages.pop_front() {
                return Poll::Ready(Some(message));
            }
            if gathered.closed {
                return Poll::Ready(None);
            }
        }
        gathered.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

/// A lazily connected channel to `address` (`host:port`). Pings keep quiet connections open and find dead ones.
/// Without `tls` it speaks plain text.
pub fn channel(address: &str, tls: Option<&Arc<Tls>>) -> Result<Channel, tonic::transport::Error> {
    let scheme = if tls.is_some() { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))?
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true)
        .initial_stream_window_size(4 * 1024 * 1024)
        .initial_connection_window_size(8 * 1024 * 1024);
    let Some(tls) = tls else {
        return Ok(endpoint.connect_lazy());
    };
    let (address, tls) = (address.to_owned(), tls.clone());
    let connect = tower::service_fn(move |_: Uri| tls.clone().connect(address.clone()));
    Ok(endpoint.connect_with_connector_lazy(connect))
}

/// Waits between attempts to connect: doubling, with jitter so that a fleet does not come back in step.
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(Self::FIRST)
    }
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(20);
    const LAST: Duration = Duration::from_secs(2);

    /// The connection works: the next failure starts anew.
    pub fn reset(&mut self) {
        self.0 = Self::FIRST;
    }

    /// Sleeps, then doubles.
    pub async fn wait(&mut self) {
        tokio::time::sleep(self.0.mul_f64(rand::random_range(0.5..1.0))).await;
        self.0 = (self.0 * 2).min(Self::LAST);
    }
}
