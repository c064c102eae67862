//! A request's body on its way in over gRPC: all of it has to be there in time, however steadily it dribbles.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http_body::{Body, Frame, SizeHint};
use tokio::time::Sleep;
use tonic::Status;

/// See the module's text.
pub struct Arriving<B> {
    body: B,
    timeout: Duration,
    /// Set when the body is waited for.
    timer: Option<Pin<Box<Sleep>>>,
    late: fn(Duration) -> Status,
}

impl<B> Arriving<B> {
    /// It has so long, from when it is first waited for; then it ends with `late`.
    pub fn new(body: B, timeout: Duration, late: fn(Duration) -> Status) -> Self {
        Self {
            body,
            timeout,
            timer: None,
            late,
        }
    }
}

impl<B> Body for Arriving<B>
where
    B: Body<Error = Status> + Unpin,
{
    type Data = B::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.body).poll_frame(context);
        if polled.is_ready() {
            return polled;
        }
        let timeout = this.timeout;
        let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        timer.as_mut().poll(context).map(|()| Some(Err((this.late)(timeout))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
