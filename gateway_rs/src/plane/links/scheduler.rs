//! The link to the scheduler: "who runs it, and when?" One `Place` stream; asks, withdrawals and releases are gathered.
//!
//! While nothing waits, the scheduler lends room on workers (`shares.rs`), and requests are placed within it at once.
//!
//! When the stream breaks, running leases are announced again and unanswered asks are asked again on the next one. When the
//! scheduler stays away, asks fail instead of waiting for ever.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering},
        Arc,
    },
    time::{Duration, Instant},
};

use headrace_core::credits::Taken;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{oneshot, Notify};

use super::{
    channel,
    shares::{SharedBlocks, Shares},
    worker::Books,
    Backoff, Outbox, MAX_MESSAGE_BYTES,
};
use crate::{
    error::{ApiError, ErrorCode},
    plane::tls::Tls,
    proto::{
        fleet_view::Pool,
        place_request::{Ask, Placed, Progress},
        placement::Answer,
        router_hello::RunningLease,
        scheduler_service_client::SchedulerServiceClient,
        GetUsageRequest, Grant, Outcome, PlaceRequest, PlaceResponse, Release, RouterHello, Settlement, Share,
        UsageQuestion, UsageReport,
    },
};

/// So long asks wait for a scheduler that is away.
const AWAY: Duration = Duration::from_secs(5);

/// So long shares are used while the scheduler is away: less than it waits for a router (`scheduler.router_grace_s`).
const SHARES_LAST: Duration = Duration::from_secs(3);

/// So many requests may have ended of which the scheduler has not said that their books are durable. Beyond it nothing new
/// is placed: what is served must be booked.
const MAX_UNSETTLED: usize = 16_384;

/// This router's side of the `Place` stream.
pub struct Scheduler {
    router_id: String,
    address: String,
    tls: Option<Arc<Tls>>,
    outbox: Arc<Outbox<PlaceRequest>>,
    next_ask: AtomicU64,
    state: Mutex<State>,
    fleet: RwLock<Arc<Fleet>>,
    connected: AtomicBool,
    /// The stream has ended, and was meant to.
    closed: Notify,
}

/// The pools by the names of their models: a pool may have thousands of workers, so requests share it.
pub type Fleet = HashMap<String, Arc<Pool>>;

struct State {
    asks: HashMap<u64, Waiting>,
    leases: HashMap<u64, Held>,
    shares: Shares,
    /// Requests whose books are open.
    bookings: HashSet<u64>,
    /// What they cost that have ended, until the scheduler says that it is durable. In the order of their numbers.
    settlements: VecDeque<Settlement>,
    next_settlement: u64,
    /// Since when there is no connection; None while there is one.
    away_since: Option<Instant>,
}

/// A lease, as it is announced on the next stream, and the room of a share that it takes.
struct Held {
    running: RunningLease,
    taken: Option<Taken>,
}

struct Waiting {
    ask: Ask,
    arrived: Instant,
    deadline: Option<Instant>,
    answer: oneshot::Sender<Result<Granted, ApiError>>,
}

/// Where a request may run.
pub struct Granted {
    /// As the scheduler said, or shares.
    pub grant: Grant,
    /// The right to.
    pub lease: Lease,
    /// And for its prompt, where that is another worker's.
    pub prefill: Option<Lease>,
}

/// The right to run one request on one worker. Given back exactly once: with its books, or when dropped.
pub struct Lease {
    scheduler: Arc<Scheduler>,
    id: u64,
    /// When the request came.
    arrived: Instant,
    released: bool,
}

impl Scheduler {
    /// Starts the link. `blocks`: who holds which prefix blocks, as far as is known.
    pub fn start(router_id: String, address: String, tls: Option<Arc<Tls>>, blocks: SharedBlocks) -> Arc<Self> {
        let scheduler = Arc::new(Self {
            router_id,
            address,
            tls,
            outbox: Arc::new(Outbox::default()),
            next_ask: AtomicU64::new(1),
            state: Mutex::new(State {
                asks: HashMap::new(),
                leases: HashMap::new(),
                shares: Shares::new(blocks),
                bookings: HashSet::new(),
                settlements: VecDeque::new(),
                next_settlement: 1,
                away_since: Some(Instant::now()),
            }),
            fleet: RwLock::default(),
            connected: AtomicBool::new(false),
            closed: Notify::new(),
        });
        tokio::spawn(scheduler.clone().keep());
        scheduler
    }

    /// The fleet, as the scheduler last described it.
    pub fn fleet(&self) -> Arc<Fleet> {
        self.fleet.read().clone()
    }

    /// The pool that serves a model.
    pub fn pool(&self, model: &str) -> Option<Arc<Pool>> {
        self.fleet.read().get(model).cloned()
    }

    /// Whether the stream is up.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Leases held now, for metrics.
    pub fn leases(&self) -> usize {
        self.state.lock().leases.len()
    }

    /// Asks for a worker. Dropping the future withdraws the ask; a grant that crosses it is given back.
    /// `must_ask`: it may not be placed without a question (its tenant has limits). Errors: what the scheduler rejected it
    /// with; UNAVAILABLE when it stays away, or is behind with the books.
    pub async fn place(
        self: &Arc<Self>,
        mut ask: Ask,
        arrived: Instant,
        deadline: Option<Instant>,
        must_ask: bool,
    ) -> Result<Granted, ApiError> {
        let number = self.next_ask.fetch_add(1, Ordering::Relaxed);
        ask.ask = number;
        ask.spent_ms = spent_ms(arrived);
        ask.time_left_ms = left_ms(deadline);
        let (sender, receiver) = oneshot::channel();
        {
            let mut state = self.state.lock();
            let unsettled = state.settlements.len();
            if unsettled >= MAX_UNSETTLED {
                let message = format!("the books of {unsettled} requests are not written yet (limit {MAX_UNSETTLED})");
                return Err(ApiError::new(ErrorCode::Unavailable, message).with_retry_after(Duration::from_secs(1)));
            }
            if !must_ask {
                if let Some(placed) = self.place_within_shares(&mut state, &mut ask, arrived) {
                    return Ok(placed);
                }
            }
            if state.away_since.is_some_and(|since| since.elapsed() > AWAY) {
                return Err(away());
            }
            let waiting = Waiting {
                ask: ask.clone(),
                arrived,
                deadline,
                answer: sender,
            };
            state.asks.insert(number, waiting);
        }
        let bytes = 128 + ask.block_hashes.len() * 8;
        self.outbox.add(bytes, |message| message.asks.push(ask));
        let mut withdrawal = Withdrawal {
            scheduler: self,
            ask: number,
            answered: false,
        };
        let answer = receiver.await;
        withdrawal.answered = true;
        answer.unwrap_or_else(|_| Err(away()))
    }

    /// A request's entry in the books, by a number that nobody else draws.
    pub fn open_booking(&self) -> u64 {
        let mut state = self.state.lock();
        loop {
            let booking = rand::random::<u64>();
            if booking != 0 && state.bookings.insert(booking) {
                return booking;
            }
        }
    }

    /// A request has ended and cost that. It is told until the scheduler says that it is durable.
    pub fn settle(&self, mut said: Settlement) {
        let mut state = self.state.lock();
        state.bookings.remove(&said.booking);
        if said.replayed && state.settlements.len() >= MAX_UNSETTLED {
            // Nothing was spent; what was saved is not worth refusing to serve.
            return;
        }
        said.number = state.next_settlement;
        state.next_settlement += 1;
        state.settlements.push_back(said.clone());
        self.outbox.add(192, |message| message.settlements.push(said));
    }

    /// What the ledger says. Errors: INVALID_ARGUMENT, UNAVAILABLE.
    pub async fn usage(&self, question: UsageQuestion) -> Result<UsageReport, ApiError> {
        let unavailable = |why: String| {
            let error = ApiError::new(ErrorCode::Unavailable, format!("the ledger cannot be asked: {why}"));
            error.with_retry_after(Duration::from_secs(1))
        };
        // Asked now and then: a connection of its own is in nobody's way.
        let channel = channel(&self.address, self.tls.as_ref()).map_err(|error| unavailable(error.to_string()))?;
        let mut client = SchedulerServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let mut request = tonic::Request::new(GetUsageRequest {
            question: Some(question),
        });
        request.set_timeout(Duration::from_secs(30));
        match client.get_usage(request).await {
            Ok(response) => Ok(response.into_inner().report.unwrap_or_default()),
            Err(status) if status.code() == tonic::Code::InvalidArgument => {
                Err(ApiError::new(ErrorCode::InvalidArgument, status.message()))
            }
            Err(status) => Err(unavailable(status.message().to_owned())),
        }
    }

    /// Says what is left to say, ends the stream, and returns when the scheduler has read all of it (or is away).
    pub async fn close(&self) {
        self.outbox.close();
        if self.is_connected() {
            self.closed.notified().await;
        }
    }

    /// Places it without asking, where there is room for it. What is placed is written down under the same lock by which
    /// shares are taken in: the scheduler hears of it before it hears that a later share is known.
    fn place_within_shares(self: &Arc<Self>, state: &mut State, ask: &mut Ask, arrived: Instant) -> Option<Granted> {
        if state.away_since.is_some_and(|since| since.elapsed() > SHARES_LAST) {
            return None;
        }
        let (grant, taken) = state.shares.place(ask)?;
        let worker = taken.worker;
        let running = running(ask, &grant).next()?;
        let held = Held {
            running,
            taken: Some(taken),
        };
        let placed = Placed {
            lease: grant.lease,
            worker,
            ask: Some(std::mem::take(ask)),
        };
        let bytes = 128 + placed.ask.as_ref().map_or(0, |ask| ask.block_hashes.len() * 8);
        state.leases.insert(grant.lease, held);
        self.outbox.add(bytes, |message| message.placed.push(placed));
        let lease = Lease {
            scheduler: self.clone(),
            id: grant.lease,
            arrived,
            released: false,
        };
        Some(Granted {
            grant,
            lease,
            prefill: None,
        })
    }

    async fn keep(self: Arc<Self>) {
        let mut backoff = Backoff::default();
        loop {
            if let Err(reason) = self.read(&mut backoff).await {
                log(&format!("scheduler {}: {reason}", self.address));
            }
            self.connected.store(false, Ordering::Relaxed);
            if self.outbox.is_closed() {
                self.closed.notify_one();
                return;
            }
            self.lost();
            backoff.wait().await;
        }
    }

    fn lost(&self) {
        let mut state = self.state.lock();
        let since = *state.away_since.get_or_insert_with(Instant::now);
        if since.elapsed() > AWAY {
            for (_, waiting) in state.asks.drain() {
                let _ = waiting.answer.send(Err(away()));
            }
        }
    }

    async fn read(self: &Arc<Self>, backoff: &mut Backoff) -> Result<(), String> {
        let channel = channel(&self.address, self.tls.as_ref()).map_err(|error| error.to_string())?;
        let mut client = SchedulerServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let outgoing = self.outbox.open(|gathered| self.announce(gathered));
        let mut responses = client
            .place(outgoing)
            .await
            .map_err(|status| status.to_string())?
            .into_inner();
        while let Some(response) = responses.message().await.map_err(|status| status.to_string())? {
            if !self.connected.swap(true, Ordering::Relaxed) {
                self.state.lock().away_since = None;
                backoff.reset();
            }
            self.answer(response);
        }
        Err("the stream was closed".to_owned())
    }

    /// The first messages of a connection: what runs, and what is still asked.
    fn announce(&self, gathered: Vec<PlaceRequest>) -> Vec<PlaceRequest> {
        let mut state = self.state.lock();
        state.shares.reset();
        let asks = state.asks.values().map(|waiting| Ask {
            spent_ms: spent_ms(waiting.arrived),
            time_left_ms: left_ms(waiting.deadline),
            ..waiting.ask.clone()
        });
        let first = PlaceRequest {
            hello: Some(RouterHello {
                router_id: self.router_id.clone(),
                running: state.leases.values().map(|held| held.running.clone()).collect(),
                bookings: (state.bookings.iter().copied())
                    .chain(state.settlements.iter().map(|said| said.booking))
                    .collect(),
            }),
            asks: asks.collect(),
            releases: gathered.into_iter().flat_map(|message| message.releases).collect(),
            settlements: state.settlements.iter().cloned().collect(),
            ..PlaceRequest::default()
        };
        vec![first]
    }

    fn answer(self: &Arc<Self>, response: PlaceResponse) {
        if let Some(fleet) = response.fleet {
            let pools = fleet.pools.into_iter().map(|pool| (pool.name.clone(), Arc::new(pool)));
            *self.fleet.write() = Arc::new(pools.collect());
        }
        if !response.shares.is_empty() {
            self.take_in(response.shares);
        }
        if response.settled > 0 {
            let mut state = self.state.lock();
            while state
                .settlements
                .front()
                .is_some_and(|said| said.number <= response.settled)
            {
                state.settlements.pop_front();
            }
        }
        for placement in response.placements {
            match placement.answer {
                Some(Answer::Grant(grant)) => self.granted(placement.ask, grant),
                Some(Answer::Rejected(error)) => {
                    if let Some(waiting) = self.state.lock().asks.remove(&placement.ask) {
                        let _ = waiting.answer.send(Err(ApiError::from(error)));
                    }
                }
                Some(Answer::Queued(_)) | None => {}
            }
        }
    }

    fn take_in(&self, shares: Vec<Share>) {
        let mut state = self.state.lock();
        let mut known = false;
        for share in shares {
            known |= state.shares.receive(share);
        }
        if known {
            let number = state.shares.known();
            self.outbox.add(16, |message| message.shares_known = number);
        }
    }

    fn granted(self: &Arc<Self>, ask: u64, grant: Grant) {
        let lease = |id| Lease {
            scheduler: self.clone(),
            id,
            arrived: Instant::now(),
            released: false,
        };
        let mut granted = Granted {
            lease: lease(grant.lease),
            prefill: grant.prefill.as_ref().map(|prefill| lease(prefill.lease)),
            grant,
        };
        let answer = {
            let mut state = self.state.lock();
            let waiting = state.asks.remove(&ask);
            if let Some(waiting) = &waiting {
                granted.lease.arrived = waiting.arrived;
                if let Some(prefill) = &mut granted.prefill {
                    prefill.arrived = waiting.arrived;
                }
                for running in running(&waiting.ask, &granted.grant) {
                    let held = Held { running, taken: None };
                    state.leases.insert(held.running.lease, held);
                }
            }
            waiting.map(|waiting| waiting.answer)
        };
        // Nobody waits any more: the leases go back by being dropped.
        if let Some(answer) = answer {
            let _ = answer.send(Ok(granted));
        }
    }

    fn begun(&self, lease: u64) {
        let mut state = self.state.lock();
        let State { leases, shares, .. } = &mut *state;
        if let Some(taken) = leases.get_mut(&lease).and_then(|held| held.taken.as_mut()) {
            shares.begun(taken);
        }
    }

    fn give_back(&self, release: Release) {
        let mut state = self.state.lock();
        let taken = state.leases.remove(&release.lease).and_then(|held| held.taken);
        if let Some(taken) = taken {
            state.shares.give_back(taken);
        }
        drop(state);
        self.outbox.add(64, |message| message.releases.push(release));
    }
}

/// Takes an ask back when its future is dropped before the answer.
struct Withdrawal<'a> {
    scheduler: &'a Arc<Scheduler>,
    ask: u64,
    answered: bool,
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        if !self.answered && self.scheduler.state.lock().asks.remove(&self.ask).is_some() {
            self.scheduler
                .outbox
                .add(8, |message| message.withdrawals.push(self.ask));
        }
    }
}

impl Lease {
    /// Its number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Tells of an answer that has grown to so many tokens: what waits behind its prompt can be placed better.
    pub fn progress(&self, output_tokens: u32) {
        self.scheduler.begun(self.id);
        let progress = Progress {
            lease: self.id,
            output_tokens,
        };
        self.scheduler.outbox.add(16, |message| message.progress.push(progress));
    }

    /// Gives it back with its books.
    pub fn release(mut self, outcome: Outcome, books: &Books) {
        self.released = true;
        let seconds = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from).as_secs_f32(),
            _ => 0.0,
        };
        self.scheduler.give_back(Release {
            lease: self.id,
            outcome: outcome as i32,
            usage: Some(books.usage()),
            kv_block_s: books.kv_block_s,
            ttft_s: seconds(Some(self.arrived), books.first),
            decode_s: seconds(books.first, books.last),
        });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.released {
            self.scheduler.give_back(Release {
                lease: self.id,
                outcome: Outcome::Cancelled as i32,
                ..Release::default()
            });
        }
    }
}

/// What a grant lets run: the answer, and where it is another worker's, the prompt.
fn running<'a>(ask: &'a Ask, grant: &'a Grant) -> impl Iterator<Item = RunningLease> + 'a {
    let running = |lease, instance_id: &String, max_tokens, booking| RunningLease {
        lease,
        instance_id: instance_id.clone(),
        request_id: ask.request_id.clone(),
        tenant: ask.tenant.clone(),
        prompt_tokens: ask.prompt_tokens,
        max_tokens,
        booking,
    };
    let prefill = grant.prefill.as_ref();
    let prompt = prefill.map(move |prefill| running(prefill.lease, &prefill.instance_id, 1, 0));
    std::iter::once(running(grant.lease, &grant.instance_id, ask.max_tokens, ask.booking)).chain(prompt)
}

fn away() -> ApiError {
    ApiError::new(ErrorCode::Unavailable, "the scheduler cannot be reached").with_retry_after(Duration::from_secs(1))
}

/// Time spent since then, in ms, for the wire.
pub fn spent_ms(arrived: Instant) -> u32 {
    u32::try_from(arrived.elapsed().as_millis()).unwrap_or(u32::MAX)
}

/// Time left until a deadline, in ms, for the wire.
pub fn left_ms(deadline: Option<Instant>) -> Option<u32> {
    deadline.map(|deadline| {
        deadline
            .saturating_duration_since(Instant::now())
            .as_millis()
            .min(u128::from(u32::MAX)) as u32
    })
}

fn log(line: &str) {
    crate::plane::log::warn(line);
}
