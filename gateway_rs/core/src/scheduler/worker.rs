//! What is believed of one worker: the leases that it holds, its last report, and the prompts that it has to compute.

use std::collections::{BTreeSet, VecDeque};

use super::{
    events::{Ask, Class, LeaseId, Link, Load, Role, WorkerHello, WorkerState},
    kinds::{Drift, KindId, Kinds, Pace},
    leases::{kv_tokens, Held, Lease, Phase},
    map::{Key, Map},
    prompts::Prompts,
    queue::{Plan, Urgency},
    steps::StepLimits,
};
use crate::{
    credits::Room,
    place::{copy_ms, factor, Candidate},
};

/// One instance of a worker, as believed.
#[derive(Debug)]
pub struct Worker {
    /// Its stream.
    pub link: Link,
    /// Who it is.
    pub hello: WorkerHello,
    /// As it last reported.
    pub load: Load,
    /// When that was.
    pub heard_s: f64,
    /// How often it was told to report.
    pub(super) heartbeat_s: f64,
    /// The leases that it holds.
    pub held: Held,
    /// Of those, what the last report may not know of yet.
    pub unreported: Held,
    /// Of those, whose KV comes from elsewhere: no report knows of it before it is there.
    pub arriving: Held,
    /// Of those, whose prompts are not computed yet.
    pub prefilling: BTreeSet<LeaseId>,
    /// Leases of requests that were put aside, by since when.
    pub aside: BTreeSet<(Key, LeaseId)>,
    /// Room that routers may use by themselves and, for all we know, do not yet.
    pub promised: Room,
    /// The one ask that this worker keeps its room for.
    pub reserved_for: Option<u64>,
    /// What goes into its steps, as it was last told.
    pub step_limits: Option<StepLimits>,
    /// What its steps cost.
    pub kind: KindId,
    /// How it differs from its kind.
    pub pace: Pace,
    pub(super) drift: Drift,
    /// Its number in the prefix index.
    pub(super) number: u32,
    /// It reports its blocks, so nothing is believed.
    pub(super) reports_blocks: bool,
    /// Blocks that it was given, oldest first.
    pub(super) believed: VecDeque<u64>,
    /// The prompts that it has to compute, those of asks that wait for it here too.
    pub prompts: Prompts,
    /// Of these, those that are no batch work.
    pub others: Prompts,
    /// Since when it has had nothing at all to do; old news while it has something.
    pub(super) idle_since_s: f64,
    /// Its slots as its pool counts them.
    pub(super) counted_slots: u64,
    /// The longest prompt that its pool counts on it for; None = it is not ready.
    pub(super) serves_prompt_tokens: Option<u32>,
    /// Choices in its batch at most.
    pub slots: u32,
    /// Choices leased at most: a full batch, and a few that hide the round trip.
    pub limit: u64,
    /// Tokens of KV in all; 0 = it does not say.
    pub kv_tokens_total: u64,
    /// The longest prompt that it can serve, with room for one token of answer.
    pub max_prompt_tokens: u32,
    pub(super) reported_prompt_tokens: u64,
    pub(super) reported_kv_tokens: u64,
}

impl Worker {
    pub(super) fn new(
        link: Link,
        hello: WorkerHello,
        now_s: f64,
        queue_factor: f64,
        number: u32,
        kind: KindId,
    ) -> Self {
        let mut worker = Self {
            link,
            hello,
            load: Load::default(),
            heard_s: now_s,
            heartbeat_s: 0.0,
            held: Held::default(),
            unreported: Held::default(),
            arriving: Held::default(),
            prefilling: BTreeSet::new(),
            aside: BTreeSet::new(),
            promised: Room::NONE,
            reserved_for: None,
            step_limits: None,
            kind,
            pace: Pace::default(),
            drift: Drift::default(),
            number,
            reports_blocks: false,
            believed: VecDeque::new(),
            prompts: Prompts::default(),
            others: Prompts::default(),
            idle_since_s: now_s,
            counted_slots: 0,
            serves_prompt_tokens: None,
            slots: 1,
            limit: 1,
            kv_tokens_total: 0,
            max_prompt_tokens: 0,
            reported_prompt_tokens: 0,
            reported_kv_tokens: 0,
        };
        worker.derive(queue_factor);
        worker
    }

    /// Takes new requests when it has room.
    pub fn ready(&self) -> bool {
        self.load.state == WorkerState::Ready
    }

    /// Is there for prompts whose answers are others'.
    pub fn prompts_only(&self) -> bool {
        self.hello.role == Role::Prefill
    }

    /// Whether a prompt may be computed here for that worker to answer.
    pub(super) fn hands_over_to(&self, other: &Self) -> bool {
        let (here, there) = (&self.hello.description, &other.hello.description);
        here.capabilities.kv_handoff && there.capabilities.kv_handoff && here.kv_state_tag == there.kv_state_tag
    }

    /// Takes any request now, as far as leases go.
    pub fn open(&self) -> bool {
        self.ready() && self.reserved_for.is_none() && self.held.choices + self.promised.choices < self.limit
    }

    /// Its number in the prefix index.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Holds no request, and none waits for it here.
    fn is_idle(&self) -> bool {
        self.held.is_empty() && self.prompts.planned() == 0
    }

    /// How long it has been idle; None when it has something to do.
    pub(super) fn idle_ms(&self, now_s: f64) -> Option<f64> {
        self.is_idle().then(|| (now_s - self.idle_since_s).max(0.0) * 1e3)
    }

    /// It has just lost something that it had to do.
    pub(super) fn note_idle(&mut self, now_s: f64) {
        if self.is_idle() {
            self.idle_since_s = now_s;
        }
    }

    /// Requests that decode.
    pub fn decoding(&self) -> u32 {
        (self.held.len() - self.prefilling.len()) as u32
    }

    /// Predicted work of prompts that it is computing and has computed already.
    fn done_ms(&self, now_s: f64) -> f64 {
        (self.prompts.given_ms() - self.prompts.fed_ms(now_s)).max(0.0)
    }

    /// Of what it has been given, what comes before such a prompt: a worker computes what is due first.
    pub fn before_ms(&self, now_s: f64, urgency: Urgency, leases: &Map<LeaseId, Lease>) -> f64 {
        let given = self.prefilling.iter().filter_map(|id| leases.get(id));
        let before = given.filter(|lease| lease.urgency <= urgency);
        let before_ms: f64 = before.map(|lease| lease.prefill_ms).sum();
        (before_ms - self.done_ms(now_s)).max(0.0)
    }

    /// A lease's prompt is to be computed.
    pub(super) fn begin_prefill(&mut self, now_s: f64, lease: &Lease) {
        if self.prefilling.insert(lease.id) {
            self.each_prompts(lease.class, |prompts| prompts.give(now_s, lease));
        }
    }

    /// It has been, or need not be any more; whether that is news.
    pub(super) fn end_prefill(&mut self, lease: &Lease) -> bool {
        let was = self.prefilling.remove(&lease.id);
        if was {
            self.each_prompts(lease.class, |prompts| prompts.take(lease));
        }
        was
    }

    /// It need not be any more, if it was to be.
    pub(super) fn drop_prefill(&mut self, now_s: f64, lease: &Lease) {
        if self.end_prefill(lease) {
            self.each_prompts(lease.class, |prompts| prompts.drop(now_s, lease.prefill_ms));
        }
    }

    /// An ask waits here for this worker, or does not any more.
    pub(super) fn plan(&mut self, now_s: f64, class: Class, plan: &Plan, waits: bool) {
        let (ms, tokens) = (plan.prefill_ms, plan.uncached_tokens);
        self.each_prompts(class, |prompts| {
            if waits {
                prompts.plan(now_s, ms, tokens);
            } else {
                prompts.unplan(now_s, ms, tokens);
            }
        });
    }

    /// No more waits there than what it holds.
    pub(super) fn bound_prefill(&mut self, now_s: f64) {
        self.prompts.bound(now_s);
        self.others.bound(now_s);
    }

    fn each_prompts(&mut self, class: Class, mut change: impl FnMut(&mut Prompts)) {
        change(&mut self.prompts);
        if class != Class::Batch {
            change(&mut self.others);
        }
    }

    /// What somebody of that class meets here.
    pub(super) fn met(&self, class: Class) -> Met<'_> {
        if class == Class::Batch {
            return Met {
                decoding: self.decoding(),
                prompts: &self.prompts,
                gives_way: 0,
            };
        }
        let given = self.held.len() - self.held.batch_requests();
        Met {
            decoding: given as u32 - self.others.given(),
            prompts: &self.others,
            gives_way: self.held.batch_requests() as u32 + self.prompts.planned() - self.others.planned(),
        }
    }

    /// Where it stands among workers of its kind for somebody of that class: [`factor`] by which a prompt there delays
    /// others, and when it has computed what goes before, or had; whoever has been idle for longest comes first.
    pub(super) fn standing(&self, class: Class) -> (u64, Key) {
        let met = self.met(class);
        let idle_at_s = if self.is_idle() {
            self.idle_since_s
        } else if met.prompts.waiting() == 0 {
            f64::NEG_INFINITY
        } else {
            met.prompts.done_at_s()
        };
        (
            factor(met.decoding, met.prompts.waiting(), met.gives_way),
            Key(idle_at_s),
        )
    }

    /// As a candidate for an ask, of whose prompt it holds so much, and whoever holds most so much.
    pub(super) fn candidate(
        &self,
        now_s: f64,
        kinds: &Kinds,
        ask: &Ask,
        hit_tokens: u32,
        most_tokens: u32,
    ) -> Candidate {
        let met = self.met(ask.class);
        let work_ms = |hit_tokens| kinds.prefill_ms(self.kind, self.pace, ask.prompt_tokens - hit_tokens, hit_tokens);
        Candidate {
            pending_prefill_ms: met.prompts.pending_ms(now_s),
            pending_prefill_tokens: met.prompts.pending_tokens(now_s),
            prefill_ms: work_ms(hit_tokens),
            copy_ms: copy_ms(work_ms, hit_tokens, most_tokens),
            idle_ms: self.idle_ms(now_s).unwrap_or(0.0),
            hit_tokens,
            decoding: met.decoding,
            waiting: met.prompts.waiting(),
            gives_way: met.gives_way,
            active_tokens: self.kv_demand_tokens(),
            cached_tokens: u64::from(self.load.kv_blocks_cached) * u64::from(self.hello.description.block_tokens),
        }
    }

    /// KV held by requests, and what is known to come: no more than all of them would take without sharing, since a report
    /// may count a prompt's blocks both as held and as still to be computed.
    pub fn kv_demand_tokens(&self) -> u64 {
        let to_come = self.reported_prompt_tokens + self.unreported.kv_tokens + self.arriving.kv_tokens;
        (self.reported_kv_tokens + to_come)
            .min(self.held.kv_tokens)
            .max(self.reported_kv_tokens)
    }

    /// Whether it may have this ask when there is room.
    pub fn can_ever_run(&self, ask: &Ask) -> bool {
        self.ready()
            && ask.prompt_tokens <= self.max_prompt_tokens
            && !ask.avoid_instances.contains(&self.hello.instance_id)
    }

    fn has_nothing(&self) -> bool {
        self.held.is_empty() && self.promised == Room::NONE
    }

    /// Whether the choices of this ask may be leased now. Who has nothing to do takes anything.
    pub fn has_slots(&self, ask: &Ask) -> bool {
        self.has_nothing()
            || !self.owes(ask) && self.held.choices + self.promised.choices + u64::from(ask.choices) <= self.limit
    }

    /// The slots that requests other than batch ones take or would have to wait for, less those that there are.
    pub(super) fn taken_by_others(&self) -> i64 {
        let others = self.held.choices - self.held.batch() + self.promised.choices;
        others as i64 - i64::from(self.slots)
    }

    /// Whether it has so many slots that none but batch requests take, which could give way.
    pub(super) fn could_make_way(&self, choices: u32) -> bool {
        let fits = self.taken_by_others() + i64::from(choices) <= 0;
        fits && self.held.batch() > 0 && self.ready() && self.reserved_for.is_none()
    }

    /// Whether others go before this ask, since they were put aside.
    pub fn owes(&self, ask: &Ask) -> bool {
        ask.class == Class::Batch && !self.aside.is_empty()
    }

    /// Whether there is room for this ask now, of whose prompt it holds so much.
    pub fn has_room(&self, ask: &Ask, hit_tokens: u32) -> bool {
        let tokens = kv_tokens(ask).saturating_sub(u64::from(hit_tokens));
        self.has_nothing() || self.has_slots(ask) && self.has_kv(tokens)
    }

    /// Whether so much KV more is there.
    pub fn has_kv(&self, tokens: u64) -> bool {
        self.kv_tokens_total == 0 || self.kv_demand_tokens() + self.promised.kv_tokens + tokens <= self.kv_tokens_total
    }

    /// What follows from description and report; kept, because placement asks for it all the time.
    pub(super) fn derive(&mut self, queue_factor: f64) {
        let (described, load) = (&self.hello.description, &self.load);
        let block_tokens = u64::from(described.block_tokens.max(1));
        self.slots = if load.slots > 0 { load.slots } else { described.slots }.max(1);
        self.limit = ((f64::from(self.slots) * queue_factor) as u64).max(1);
        let blocks = if load.kv_blocks_total > 0 {
            load.kv_blocks_total
        } else {
            described.kv_blocks
        };
        self.kv_tokens_total = u64::from(blocks) * block_tokens;
        let bounds = [u64::from(described.context_tokens), self.kv_tokens_total];
        let bound = bounds
            .into_iter()
            .filter(|&bound| bound > 0)
            .min()
            .unwrap_or(u64::from(u32::MAX));
        self.max_prompt_tokens = (bound - 1).min(u64::from(u32::MAX)) as u32;
        self.reported_prompt_tokens = load.waiting_prompt_tokens + load.running_prompt_tokens;
        self.reported_kv_tokens = u64::from(load.kv_blocks_used) * block_tokens;
    }

    /// Prompt tokens that it need not compute, when it holds so many leading blocks.
    pub(super) fn hit_tokens(&self, ask: &Ask, blocks: u32) -> u32 {
        (blocks * self.hello.description.block_tokens).min(ask.prompt_tokens.saturating_sub(1))
    }

    /// What the last report says of prompts that wait, and what cannot be in it yet.
    pub(super) fn believe_prompts(&mut self, now_s: f64, kinds: &Kinds, leases: &mut Map<LeaseId, Lease>) {
        if self.reported_prompt_tokens == 0 && self.load.waiting_requests == 0 && !self.prefilling.is_empty() {
            // Their routers have not said so (yet).
            for id in self.prefilling.clone() {
                if let Some(lease) = leases.get_mut(&id).filter(|lease| !self.unreported.contains(lease)) {
                    lease.phase = Phase::Decode;
                    self.end_prefill(lease);
                }
            }
        }
        let prefilling = self.prefilling.iter().filter_map(|id| leases.get(id));
        let (mut known_tokens, mut known_others) = (0, 0);
        for lease in prefilling.filter(|lease| !self.unreported.contains(lease)) {
            let tokens = u64::from(lease.uncached_tokens);
            known_tokens += tokens;
            known_others += if lease.class == Class::Batch { 0 } else { tokens };
        }
        // What it has computed of them: of one prompt from its start, mostly, and the beginning of a prompt costs less than
        // its end. A report counts prompts that wait in full, so this errs towards too little.
        let done_tokens = (self.prompts.given_tokens())
            .saturating_sub(self.reported_prompt_tokens)
            .min(known_tokens);
        let left_ms = |prompts: &Prompts, done_tokens: u64| {
            if done_tokens == 0 {
                return prompts.given_ms();
            }
            let done_tokens = u32::try_from(done_tokens).unwrap_or(u32::MAX);
            (prompts.given_ms() - kinds.prefill_ms(self.kind, self.pace, done_tokens, 0)).max(0.0)
        };
        // Batch work is computed last.
        let (all_ms, others_ms) = (
            left_ms(&self.prompts, done_tokens),
            left_ms(&self.others, done_tokens.min(known_others)),
        );
        self.prompts.believe(now_s, all_ms);
        self.others.believe(now_s, others_ms);
    }
}

/// What somebody meets at a worker, before whom some of it may stand back.
pub(super) struct Met<'a> {
    /// Requests that decode.
    pub decoding: u32,
    /// Prompts to be computed first.
    pub prompts: &'a Prompts,
    /// Requests that give way.
    pub gives_way: u32,
}
