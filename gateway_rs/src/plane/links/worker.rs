//! Links to workers: "run it". One `Run` stream for each worker instance carries all of this router's requests.
//!
//! The reader only sorts a frame's deltas into the requests' mailboxes and wakes them; text is made by the request itself,
//! on whatever thread polls it. A request that is not polled (its client does not read) has a bounded mailbox.
//!
//! The lease goes back when the worker owes nothing more: by the request itself, which knows how many of the ids it took, or
//! without it when it does not look within a second (a client that reads slowly must not hold a worker's slot).

use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use ahash::AHashMap;
use parking_lot::Mutex;
use tonic::Streaming;

use super::{channel, scheduler::Lease, Outbox, MAX_MESSAGE_BYTES};
use crate::plane::tls::Tls;
use crate::proto::{
    worker_service_client::WorkerServiceClient, Cancel, ModelDescription, Outcome, Proceed, RunHello, RunRequest,
    RunResponse, Submit, TokenDelta, Usage,
};

/// Decides whether a worker that has introduced itself may be used; the error says why not.
pub type Accept = dyn Fn(&ModelDescription) -> Result<(), String> + Send + Sync;

/// All worker links of this router.
pub struct Workers {
    router_id: String,
    max_unread_tokens: usize,
    accept: Box<Accept>,
    tls: Option<Arc<Tls>>,
    links: Mutex<HashMap<String, Arc<WorkerLink>>>,
}

/// One worker instance, as this router sees it.
pub struct WorkerLink {
    /// The worker's process, new for each start.
    pub instance_id: String,
    address: String,
    max_unread_tokens: usize,
    outbox: Arc<Outbox<RunRequest>>,
    next_request: AtomicU64,
    state: Mutex<LinkState>,
    started: Instant,
    /// Of the last frame that showed progress, in ms since `started`.
    progress_ms: AtomicU64,
}

#[derive(Default)]
struct LinkState {
    mailboxes: AHashMap<u64, Arc<Mailbox>>,
    iteration: u64,
    /// Why the link is over; then nothing more is taken.
    closed: Option<String>,
}

/// What the reader has for one request.
#[derive(Default)]
struct Mailbox(Mutex<Mail>);

#[derive(Default)]
struct Mail {
    deltas: Vec<TokenDelta>,
    unread_tokens: usize,
    end: Option<RunEnd>,
    waker: Option<Waker>,
    lease: Option<Lease>,
    choices_left: u32,
    last_outcome: i32,
    books: Books,
    /// Another worker has computed the prompt, and said what of it was reused.
    begun: bool,
}

/// What a run has cost so far.
#[derive(Clone, Debug, Default)]
pub struct Books {
    /// Ids of the prompt.
    pub prompt_tokens: u32,
    /// Of these, how many were reused.
    pub cached_prompt_tokens: u32,
    /// Ids that came back, over all choices.
    pub completion_tokens: u32,
    /// When the worker was asked.
    pub submitted: Option<Instant>,
    /// When the first id came.
    pub first: Option<Instant>,
    /// When the last id came.
    pub last: Option<Instant>,
    /// Blocks held, times seconds, as the worker counts.
    pub kv_block_s: f32,
}

/// Why no more deltas come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// The worker has finished every choice.
    Finished,
    /// The connection is gone; the text says how.
    Lost(String),
    /// The client left too much unread; the generation was stopped.
    Unread,
}

impl Workers {
    /// No links yet.
    pub fn new(router_id: String, max_unread_tokens: usize, accept: Box<Accept>, tls: Option<Arc<Tls>>) -> Self {
        Self {
            router_id,
            max_unread_tokens,
            accept,
            tls,
            links: Mutex::default(),
        }
    }

    /// The link to that instance, opened when there is none.
    pub fn link(self: &Arc<Self>, instance_id: &str, address: &str) -> Arc<WorkerLink> {
        let mut links = self.links.lock();
        if let Some(link) = links.get(instance_id) {
            return link.clone();
        }
        let link = Arc::new(WorkerLink {
            instance_id: instance_id.to_owned(),
            address: address.to_owned(),
            max_unread_tokens: self.max_unread_tokens,
            outbox: Arc::new(Outbox::default()),
            next_request: AtomicU64::new(1),
            state: Mutex::default(),
            started: Instant::now(),
            progress_ms: AtomicU64::new(0),
        });
        links.insert(instance_id.to_owned(), link.clone());
        tokio::spawn(self.clone().keep(link.clone()));
        link
    }

    /// Open links, for metrics.
    pub fn count(&self) -> usize {
        self.links.lock().len()
    }

    async fn keep(self: Arc<Self>, link: Arc<WorkerLink>) {
        let reason = match self.read(&link).await {
            Ok(()) => "the worker closed its stream".to_owned(),
            Err(reason) => reason,
        };
        let mut links = self.links.lock();
        if links
            .get(&link.instance_id)
            .is_some_and(|current| Arc::ptr_eq(current, &link))
        {
            links.remove(&link.instance_id);
        }
        drop(links);
        link.close(reason);
    }

    async fn read(&self, link: &Arc<WorkerLink>) -> Result<(), String> {
        let channel = channel(&link.address, self.tls.as_ref()).map_err(|error| error.to_string())?;
        let mut client = WorkerServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let hello = RunHello {
            router_id: self.router_id.clone(),
            instance_id: link.instance_id.clone(),
        };
        // What is asked of it waits until it has said who it is: a stranger must see no prompt.
        let outgoing = link.outbox.open_held(RunRequest {
            hello: Some(hello),
            ..RunRequest::default()
        });
        let mut frames: Streaming<RunResponse> = client
            .run(outgoing)
            .await
            .map_err(|status| describe(&status))?
            .into_inner();
        let mut wakers = Vec::new();
        while let Some(frame) = frames.message().await.map_err(|status| describe(&status))? {
            if let Some(welcome) = &frame.welcome {
                (self.accept)(&welcome.description.clone().unwrap_or_default())?;
                link.outbox.let_go();
            }
            link.sort(frame, &mut wakers);
            wakers.drain(..).for_each(Waker::wake);
        }
        Ok(())
    }
}

fn describe(status: &tonic::Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

impl WorkerLink {
    /// Asks the worker to run it; `request` and `prompt_tokens` are filled in here. Never blocks.
    pub fn submit(self: &Arc<Self>, mut submit: Submit, lease: Option<Lease>) -> Run {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let choices = submit
            .sampling
            .as_ref()
            .map_or(1, |sampling| sampling.seeds.len().max(1)) as u32;
        let mailbox = Arc::new(Mailbox(Mutex::new(Mail {
            lease,
            choices_left: choices,
            books: Books {
                prompt_tokens: submit.prompt_ids.len() as u32,
                submitted: Some(Instant::now()),
                ..Books::default()
            },
            ..Mail::default()
        })));
        submit.request = request;
        let run = Run {
            link: self.clone(),
            request,
            epoch: submit.epoch,
            mailbox: mailbox.clone(),
            submitted: Instant::now(),
        };
        let mut state = self.state.lock();
        match &state.closed {
            Some(reason) => {
                let reason = reason.clone();
                drop(state);
                mailbox.0.lock().finish(RunEnd::Lost(reason), Outcome::WorkerLost);
            }
            None => {
                state.mailboxes.insert(request, mailbox);
                drop(state);
                // Four bytes an id, and some 200 for the rest.
                let bytes = submit.prompt_ids.len() * 4 + 256;
                self.outbox.add(bytes, |message| message.submits.push(submit));
            }
        }
        run
    }

    fn sort(&self, frame: RunResponse, wakers: &mut Vec<Waker>) {
        let mut state = self.state.lock();
        if frame.iteration != state.iteration || !frame.deltas.is_empty() {
            state.iteration = frame.iteration;
            self.progress_ms
                .store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
        }
        let now = Instant::now();
        for delta in frame.deltas {
            let (request, epoch) = (delta.request, delta.epoch);
            let Some(mailbox) = state.mailboxes.get(&request) else {
                continue; // cancelled while this was on its way
            };
            let mut mail = mailbox.0.lock();
            let over = mail.take(delta, now, self.max_unread_tokens);
            if over && mail.waker.is_none() && mail.lease.is_some() {
                tokio::spawn(release_unattended(mailbox.clone()));
            }
            if let Some(waker) = mail.waker.take() {
                wakers.push(waker);
            }
            let unread = mail.end == Some(RunEnd::Unread);
            drop(mail);
            if over {
                state.mailboxes.remove(&request);
                if unread {
                    self.cancel(request, epoch, None, Outcome::Cancelled);
                }
            }
        }
    }

    fn cancel(&self, request: u64, epoch: u32, choice: Option<u32>, reason: Outcome) {
        let cancel = Cancel {
            request,
            epoch,
            choice,
            reason: reason as i32,
        };
        self.outbox.add(32, |message| message.cancels.push(cancel));
    }

    fn close(&self, reason: String) {
        let mailboxes = {
            let mut state = self.state.lock();
            state.closed = Some(reason.clone());
            std::mem::take(&mut state.mailboxes)
        };
        self.outbox.clear();
        for mailbox in mailboxes.into_values() {
            let waker = {
                let mut mail = mailbox.0.lock();
                mail.finish(RunEnd::Lost(reason.clone()), Outcome::WorkerLost);
                mail.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

/// So long a request that isn't waiting may take to look at what came last.
const UNATTENDED: Duration = Duration::from_secs(1);

/// The worker has finished and nobody is waiting for it: the request is about to look, or its client does not read.
async fn release_unattended(mailbox: Arc<Mailbox>) {
    tokio::time::sleep(UNATTENDED).await;
    let mut mail = mailbox.0.lock();
    let outcome = mail.reported();
    mail.release(outcome);
}

impl Mail {
    /// Takes a delta in; true when the run is over with it.
    fn take(&mut self, mut delta: TokenDelta, now: Instant, max_unread_tokens: usize) -> bool {
        if self.begun {
            delta.cached_prompt_tokens = None;
        }
        let said = self.books.completion_tokens;
        self.books.completion_tokens += delta.ids.len() as u32;
        if let Some(cached) = delta.cached_prompt_tokens {
            self.books.cached_prompt_tokens = cached;
        }
        if !delta.ids.is_empty() {
            self.books.first.get_or_insert(now);
            self.books.last = Some(now);
        }
        if let Some(finish) = &delta.finish {
            self.choices_left = self.choices_left.saturating_sub(1);
            self.last_outcome = finish.outcome;
            self.books.kv_block_s += finish.kv_block_s;
        }
        self.unread_tokens += delta.ids.len();
        if self.unread_tokens > max_unread_tokens {
            self.finish(RunEnd::Unread, Outcome::Cancelled);
            return true;
        }
        self.deltas.push(delta);
        if self.choices_left == 0 {
            self.end.get_or_insert(RunEnd::Finished);
            return true;
        }
        // With the first token, and each time that their number has doubled; the end is told by the release.
        let now_said = self.books.completion_tokens;
        if now_said > said && (said == 0 || said.ilog2() < now_said.ilog2()) {
            if let Some(lease) = &self.lease {
                lease.progress(now_said);
            }
        }
        false
    }

    /// The worker owes nothing more, and the request will not say how many ids it took.
    fn finish(&mut self, end: RunEnd, outcome: Outcome) {
        self.end.get_or_insert(end);
        self.release(outcome);
    }

    /// The lease goes back, once.
    fn release(&mut self, outcome: Outcome) {
        if let Some(lease) = self.lease.take() {
            lease.release(outcome, &self.books);
        }
    }

    /// How the last choice ended, as the worker said.
    fn reported(&self) -> Outcome {
        Outcome::try_from(self.last_outcome).unwrap_or(Outcome::Failed)
    }
}

impl Books {
    /// The same as it goes on the wire.
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_prompt_tokens: self.cached_prompt_tokens,
            completion_tokens: self.completion_tokens,
        }
    }
}

/// One attempt of one request on one worker. Dropping it cancels what still runs and gives the lease back.
pub struct Run {
    link: Arc<WorkerLink>,
    request: u64,
    epoch: u32,
    mailbox: Arc<Mailbox>,
    submitted: Instant,
}

impl Run {
    /// Moves what came into `deltas`. Ready(None) = more may come; Ready(Some) = no more after these.
    pub fn poll(&mut self, context: &mut Context<'_>, deltas: &mut Vec<TokenDelta>) -> Poll<Option<RunEnd>> {
        let mut mail = self.mailbox.0.lock();
        if !mail.deltas.is_empty() {
            // Both sides keep their room.
            match deltas.is_empty() {
                true => std::mem::swap(deltas, &mut mail.deltas),
                false => deltas.append(&mut mail.deltas),
            }
            mail.unread_tokens = 0;
        } else if mail.end.is_none() {
            match &mut mail.waker {
                Some(waker) => waker.clone_from(context.waker()),
                waker => *waker = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        Poll::Ready(mail.end.clone())
    }

    /// Tells how its answer begins, when its prompt was another worker's: with these ids, whose KV is to be had by that
    /// reference; no ids = not at all, and all is computed here.
    pub fn proceed(&mut self, ids: Vec<u32>, kv_reference: String, cached_prompt_tokens: u32) {
        // What it did before was to wait.
        self.submitted = Instant::now();
        let mut mail = self.mailbox.0.lock();
        if !ids.is_empty() {
            mail.begun = true;
            mail.books.first.get_or_insert(self.submitted);
            mail.books.completion_tokens += ids.len() as u32;
            mail.books.cached_prompt_tokens = cached_prompt_tokens;
        }
        drop(mail);
        let proceed = Proceed {
            request: self.request,
            epoch: self.epoch,
            ids,
            kv_reference,
        };
        self.link.outbox.add(64, |message| message.proceeds.push(proceed));
    }

    /// Stops one choice of several; the others go on.
    pub fn stop_choice(&self, choice: u32, reason: Outcome) {
        self.link.cancel(self.request, self.epoch, Some(choice), reason);
    }

    /// Stops whatever still runs, says why, and how many of the ids that came were taken.
    pub fn stop(&self, reason: Outcome, taken_tokens: u32) {
        let running = self.link.state.lock().mailboxes.remove(&self.request).is_some();
        if running {
            self.link.cancel(self.request, self.epoch, None, reason);
        }
        let mut mail = self.mailbox.0.lock();
        mail.books.completion_tokens = taken_tokens.min(mail.books.completion_tokens);
        mail.finish(RunEnd::Finished, reason);
    }

    /// How long the worker has shown no progress at all while this run waits.
    pub fn silence(&self) -> Duration {
        let progress = self.link.started + Duration::from_millis(self.link.progress_ms.load(Ordering::Relaxed));
        progress.max(self.submitted).elapsed()
    }

    /// What it has cost so far.
    pub fn books(&self) -> Books {
        self.mailbox.0.lock().books.clone()
    }

    /// The worker instance it runs on.
    pub fn instance_id(&self) -> &str {
        &self.link.instance_id
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stop(Outcome::Cancelled, u32::MAX);
    }
}
