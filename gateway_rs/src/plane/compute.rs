//! Threads for work that takes milliseconds: long bodies and prompts, which must not hold up the threads that serve streams.
//!
//! There are as many as those, and what waits for them is served in its order of arrival: twenty long prompts that come at
//! once are then finished one after another, and not all of them at the end. What is short is done where it stands, since
//! a hand-over costs more. The queue is bounded by the requests that may be open.

use tokio::runtime::{Builder, Handle, Runtime};
use tokio_util::task::AbortOnDropHandle;

use crate::error::{ApiError, ErrorCode};

/// Work over so many bytes is long. A hundred microseconds or so.
const LONG_BYTES: usize = 16 * 1024;

/// Where long work is done.
#[derive(Clone)]
pub struct Compute(Handle);

impl Compute {
    /// The runtime whose threads do it; it lives as long as the server.
    pub fn runtime(threads: usize) -> std::io::Result<Runtime> {
        Builder::new_current_thread()
            .thread_name("headrace-compute")
            .max_blocking_threads(threads.max(1))
            .build()
    }

    /// Hands work to that runtime.
    pub fn new(runtime: &Runtime) -> Self {
        Self(runtime.handle().clone())
    }

    /// Does `work` on a text of so many bytes (`usize::MAX` when nobody knows), here or there. Errors: the work's own; INTERNAL when it panics.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes <= LONG_BYTES {
            return work();
        }
        // Work that has not begun when its client leaves is never done.
        let done = AbortOnDropHandle::new(self.0.spawn_blocking(work)).await;
        done.unwrap_or_else(|error| Err(ApiError::new(ErrorCode::Internal, error.to_string())))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::{mpsc, Arc};

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn long_work_is_done_in_its_order_of_arrival_and_short_work_at_once() {
        let pool = Compute::runtime(1).unwrap();
        let compute = Compute::new(&pool);
        let outer = Builder::new_current_thread().build().unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let (open, gate) = mpsc::channel::<()>();
        outer.block_on(async {
            let held = compute.run(usize::MAX, move || {
                gate.recv()
                    .map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))
            });
            let later: Vec<_> = (0..8)
                .map(|number| {
                    let order = order.clone();
                    compute.run(usize::MAX, move || {
                        order.lock().push(number);
                        Ok(number)
                    })
                })
                .collect();
            let all = async { futures_util::future::join(held, futures_util::future::join_all(later)).await };
            let short = async {
                // The only thread is held: what is short needs none.
                assert_eq!(compute.run(1, || Ok(1)).await.unwrap(), 1);
                assert!(order.lock().is_empty());
                open.send(()).unwrap();
            };
            let ((held, later), ()) = futures_util::future::join(all, short).await;
            held.unwrap();
            assert_eq!(
                later.into_iter().map(Result::unwrap).collect::<Vec<_>>(),
                (0..8).collect::<Vec<_>>()
            );
        });
        assert_eq!(*order.lock(), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn a_panic_of_the_work_is_an_error_of_its_request() {
        let pool = Compute::runtime(1).unwrap();
        let compute = Compute::new(&pool);
        let outer = Builder::new_current_thread().build().unwrap();
        let panics = || -> Result<(), ApiError> { std::panic::resume_unwind(Box::new("for the test")) };
        let error = outer.block_on(compute.run(usize::MAX, panics)).unwrap_err();
        assert_eq!(error.code, ErrorCode::Internal);
        assert_eq!(outer.block_on(compute.run(usize::MAX, || Ok(2))).unwrap(), 2);
    }
}
