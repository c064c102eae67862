//! A simulated worker: iteration-level batching with chunked prefill over blocks of KV, timed by a cost table.
//!
//! Each step computes one token of every answer and as many prompt tokens as the chunk rule leaves room for, in the queue's
//! order; requests that have computed part of their prompt and those that wait stand in one queue. A stretch of steps that
//! only decode is one event: its end is known, and a newcomer cuts it short at the next step's boundary. When KV runs out,
//! the last in the queue's order gives up its blocks and computes them again later.
//!
//! Batch work comes after all others and gives up its place for their prompts, as in live workers
//! (`worker/composer.py`), but for a small part that is overdue. That it also stands still meanwhile, and decodes by turns
//! beside others, is not simulated: others are slower here than live.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;

use super::kv::Kv;
use crate::cost::{ChunkLimits, CostModel, CostTable, Shape, StepBudget};
use crate::scheduler::events::StepReport;
use crate::scheduler::pool::slots_to_stay;

/// How many prompt tokens a step may compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Chunk {
    /// So many tokens in the step, those that decode included.
    Fixed(u32),
    /// The most that keep the step within nine tenths of the target between tokens.
    Dynamic,
    /// As live workers do: so many prompt tokens as the scheduler last said, in all `chunk_tokens` at most.
    Scheduler,
}

/// Whose prompt is computed first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Arrival.
    Fcfs,
    /// Arrival plus the target for the first token.
    #[default]
    Edf,
    /// The prompt's predicted work.
    Sjf,
    /// The answer's expected length.
    ShortestOutput,
}

/// How a worker runs.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// What steps take.
    pub table: Arc<CostTable>,
    /// All times are multiplied by this.
    pub slowdown: f64,
    /// Requests that may be started at once.
    pub max_batch: u32,
    /// Prompt tokens in a step.
    pub chunk: Chunk,
    /// The most prompt tokens in a step, whoever sizes it.
    pub chunk_tokens: u32,
    /// Between tokens; the dynamic chunk keeps to it.
    pub tpot_target_s: f64,
    /// Whose turn.
    pub order: Order,
    /// Give up a request, before it is started, that can't have its first token in time.
    pub shed: bool,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks on the device; 0 = as many as the table says.
    pub kv_blocks: u32,
    /// Blocks of the host tier.
    pub host_blocks: u32,
    /// What loading a block from the host adds to a step.
    pub host_block_ms: f64,
}

/// A block of 512 tokens of an 8B model (64 MiB) at 25 GB/s takes 2.7 ms, of which a quarter isn't hidden.
pub const HOST_BLOCK_MS: f64 = 2.7 * 0.25;

/// The dynamic chunk never falls below this: prefill doesn't stand still.
const CHUNK_FLOOR: u32 = 128;

/// The most prompt tokens in a step, where nothing else is said.
pub const CHUNK_MOST: u32 = 8192;

/// Share of the target between tokens that a step may take.
const STEP_SHARE: f64 = 0.9;

/// A request is given up when so many times its predicted prefill doesn't fit before its target.
const SHED_MARGIN: f64 = 1.2;

/// Share of the device's blocks that starting a request leaves for those who run.
const WATERMARK: f64 = 0.01;

/// In keys of the queue: batch work that makes way for others.
const MAKES_WAY: u64 = 1 << 63;

/// Steps told of in one report at most.
const STEPS_REPORTED: usize = 8;

/// A request for this worker.
#[derive(Clone, Debug)]
pub struct Job {
    /// The driver's number.
    pub request: u32,
    /// Prompt, and answer so far where this is a later attempt.
    pub prompt_tokens: u32,
    /// Tokens still to come, at least 1.
    pub output_tokens: u32,
    /// Names of the prompt's full blocks.
    pub blocks: Arc<[u64]>,
    /// When it came to the mesh.
    pub arrival_s: f64,
    /// When its first token is due.
    pub due_s: f64,
    /// As far as anybody knows.
    pub expected_output_tokens: u32,
    /// Its class is batch.
    pub is_batch: bool,
    /// May be given up: it is the first attempt.
    pub may_shed: bool,
    /// The KV of all but its last prompt token has come from elsewhere.
    pub has_kv: bool,
}

/// What a worker says of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Said {
    /// Its first token is there.
    First {
        /// Whose.
        request: u32,
        /// Prompt tokens that were in KV.
        cached_tokens: u32,
    },
    /// Its last token is there.
    Finished {
        /// Whose.
        request: u32,
    },
    /// It was given up before it was started.
    Shed {
        /// Whose.
        request: u32,
    },
}

/// A worker's load, for the scheduler's report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Not started.
    pub waiting: u32,
    /// Prompt tokens of those.
    pub waiting_tokens: u64,
    /// Started, with part of the prompt to compute.
    pub prefilling: u32,
    /// Prompt tokens of those, not yet computed.
    pub prefilling_tokens: u64,
    /// Decoding.
    pub decoding: u32,
    /// Context of those.
    pub context_tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Prefill,
    Decode,
    Paused,
}

#[derive(Debug)]
struct Seq {
    job: Job,
    state: State,
    /// In the queue; unique by the slot.
    key: u64,
    /// Prompt tokens in KV, of `target`.
    computed: u32,
    /// Tokens to compute before it decodes: the prompt, and after a preemption the answer so far.
    target: u32,
    cached: u32,
    generated: u32,
    /// Step at which it began to decode, and what it had then.
    decode_step: u64,
    decode_context: u32,
    named: usize,
    private: usize,
    started: bool,
    /// Names its stay in the batch: what the heap says of another is void.
    stay: u64,
}

impl Seq {
    fn makes_way(&self) -> bool {
        self.key & MAKES_WAY != 0
    }

    fn stays(&self) -> bool {
        self.job.is_batch && !self.makes_way()
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Doing {
    Nothing,
    /// One step: chunks by slot.
    Step {
        chunks: Vec<(u32, u32)>,
        ends_s: f64,
    },
    /// So many steps that only decode, of this shape at the first.
    Stretch {
        steps: u64,
        began_s: f64,
        ends_s: f64,
        shape: Shape,
    },
}

/// What comes next for a decoding sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Finish,
    Block,
}

/// One worker.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    cost: CostModel,
    chunk_tokens: u32,
    /// How many prompt tokens take as long as one pair of tokens in attention, as the scheduler says.
    pair_tokens: f64,
    kv: Kv,
    seqs: Vec<Option<Seq>>,
    free: Vec<u32>,
    /// Waiting or prefilling, in order.
    queue: BTreeSet<(u64, u32)>,
    /// (step, what, slot, stay): when each decoding sequence next needs something.
    due: BinaryHeap<Reverse<(u64, Due, u32, u64)>>,
    load: EngineLoad,
    step: u64,
    stays: u64,
    doing: Doing,
    steps: Vec<StepReport>,
    preemptions: u64,
    /// Sequences of batch work that make way no more.
    staying: u32,
    busy_s: f64,
}

impl Engine {
    /// An idle worker.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        let blocks = match config.kv_blocks {
            0 => (config.table.kv_tokens / u64::from(config.block_tokens.max(1))) as u32,
            blocks => blocks,
        };
        Self {
            cost: CostModel::new(Some(Arc::clone(&config.table))),
            chunk_tokens: config.chunk_tokens,
            pair_tokens: 0.0,
            kv: Kv::new(blocks.max(1) as usize, config.host_blocks as usize),
            seqs: Vec::new(),
            free: Vec::new(),
            queue: BTreeSet::new(),
            due: BinaryHeap::new(),
            load: EngineLoad::default(),
            step: 0,
            stays: 0,
            doing: Doing::Nothing,
            steps: Vec::new(),
            preemptions: 0,
            staying: 0,
            busy_s: 0.0,
            config,
        }
    }

    /// How it runs.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Its load, by requests and tokens.
    #[must_use]
    pub fn load(&self) -> EngineLoad {
        self.load
    }

    /// Its KV.
    pub fn kv(&mut self) -> &mut Kv {
        &mut self.kv
    }

    /// Steps done.
    #[must_use]
    pub fn iteration(&self) -> u64 {
        self.step
    }

    /// Requests that gave up their KV and computed it again.
    #[must_use]
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Seconds in which it computed.
    #[must_use]
    pub fn busy_s(&self) -> f64 {
        self.busy_s
    }

    /// Some of the steps since the last call.
    pub fn take_steps(&mut self) -> Vec<StepReport> {
        std::mem::take(&mut self.steps)
    }

    /// The longest prompt and answer that its KV holds.
    #[must_use]
    pub fn most_tokens(&self) -> u64 {
        self.kv.device_blocks() as u64 * u64::from(self.config.block_tokens)
    }

    /// When to call [`Self::advance`] next.
    #[must_use]
    pub fn busy_until(&self) -> Option<f64> {
        match self.doing {
            Doing::Nothing => None,
            Doing::Step { ends_s, .. } | Doing::Stretch { ends_s, .. } => Some(ends_s),
        }
    }

    /// What the scheduler says of chunks.
    pub fn set_chunk(&mut self, tokens: u32, pair_tokens: f64) {
        self.chunk_tokens = tokens.max(1);
        self.pair_tokens = pair_tokens;
    }

    /// Takes a request.
    pub fn submit(&mut self, now_s: f64, job: Job, said: &mut Vec<Said>) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.seqs.push(None);
            (self.seqs.len() - 1) as u32
        });
        let key = match self.config.order {
            Order::Fcfs => job.arrival_s,
            Order::Edf => job.due_s,
            Order::Sjf => self.cost.prefill_ms(job.prompt_tokens, 0),
            Order::ShortestOutput => f64::from(job.expected_output_tokens),
        };
        let seq = Seq {
            state: State::Waiting,
            // Bits of numbers that aren't negative are in their order.
            key: key.max(0.0).to_bits() | if job.is_batch { MAKES_WAY } else { 0 },
            computed: 0,
            target: job.prompt_tokens,
            cached: 0,
            generated: 0,
            decode_step: 0,
            decode_context: 0,
            named: 0,
            private: 0,
            started: !job.may_shed,
            stay: self.new_stay(),
            job,
        };
        self.wait(slot, seq);
        self.interrupt(now_s, said);
    }

    /// Puts a request aside, with what it holds given up. Nothing if it isn't here, or is put aside already.
    pub fn pause(&mut self, now_s: f64, request: u32, said: &mut Vec<Said>) {
        let slot = self.slot_of(request, |state| state != State::Paused);
        self.settle(now_s);
        if let Some((slot, mut seq)) = slot.and_then(|slot| self.take(slot)) {
            self.leave(slot, &mut seq);
            seq.state = State::Paused;
            self.seqs[slot as usize] = Some(seq);
            self.interrupt(now_s, said);
        }
    }

    /// Goes on with a request that was put aside.
    pub fn resume(&mut self, now_s: f64, request: u32, said: &mut Vec<Said>) {
        let slot = self.slot_of(request, |state| state == State::Paused);
        if let Some((slot, seq)) = slot.and_then(|slot| self.take(slot)) {
            self.wait(slot, seq);
            self.interrupt(now_s, said);
        }
    }

    /// A request is not wanted any more. Nothing if it isn't here.
    pub fn cancel(&mut self, now_s: f64, request: u32, said: &mut Vec<Said>) {
        let slot = self.slot_of(request, |_| true);
        self.settle(now_s);
        if let Some((slot, mut seq)) = slot.and_then(|slot| self.take(slot)) {
            self.leave(slot, &mut seq);
            self.gone(slot, &seq);
            self.interrupt(now_s, said);
        }
    }

    /// All requests and all KV are lost. Names them, with the tokens that each had said.
    pub fn kill(&mut self, now_s: f64) -> Vec<(u32, u32)> {
        self.settle(now_s);
        let lost = self
            .seqs
            .iter()
            .flatten()
            .map(|seq| (seq.job.request, self.said_by(seq)))
            .collect();
        let (kv, step) = (std::mem::replace(&mut self.kv, Kv::new(1, 0)), self.step);
        let (preemptions, busy_s) = (self.preemptions, self.busy_s);
        *self = Self::new(self.config.clone());
        self.kv = kv;
        self.kv.clear();
        (self.preemptions, self.busy_s, self.step) = (preemptions, busy_s, step);
        lost
    }

    /// The step under way is over.
    pub fn advance(&mut self, now_s: f64, said: &mut Vec<Said>) {
        match std::mem::replace(&mut self.doing, Doing::Nothing) {
            Doing::Nothing => {}
            Doing::Step { chunks, .. } => {
                self.decoded(1);
                for (slot, tokens) in chunks {
                    self.computed(slot, tokens, said);
                }
            }
            Doing::Stretch { steps, .. } => self.decoded(steps),
        }
        self.meet_dues(said);
        self.compose(now_s, said);
    }

    fn said_by(&self, seq: &Seq) -> u32 {
        match seq.state {
            State::Decode => seq.generated + (self.step - seq.decode_step) as u32,
            _ => seq.generated,
        }
    }

    fn new_stay(&mut self) -> u64 {
        self.stays += 1;
        self.stays
    }

    fn slot_of(&self, request: u32, fits: impl Fn(State) -> bool) -> Option<u32> {
        let found = |seq: &Option<Seq>| {
            seq.as_ref()
                .is_some_and(|seq| seq.job.request == request && fits(seq.state))
        };
        self.seqs.iter().position(found).map(|slot| slot as u32)
    }

    fn take(&mut self, slot: u32) -> Option<(u32, Seq)> {
        self.seqs[slot as usize].take().map(|seq| (slot, seq))
    }

    fn wait(&mut self, slot: u32, mut seq: Seq) {
        seq.state = State::Waiting;
        self.queue.insert((seq.key, slot));
        self.load.waiting += 1;
        self.load.waiting_tokens += u64::from(seq.target);
        self.seqs[slot as usize] = Some(seq);
    }

    /// Out of queue and batch; its blocks are free. What it has said becomes part of what it has to compute.
    fn leave(&mut self, slot: u32, seq: &mut Seq) {
        match seq.state {
            State::Waiting => {
                self.queue.remove(&(seq.key, slot));
                self.load.waiting -= 1;
                self.load.waiting_tokens -= u64::from(seq.target);
            }
            State::Prefill => {
                self.queue.remove(&(seq.key, slot));
                self.load.prefilling -= 1;
                self.load.prefilling_tokens -= u64::from(seq.target - seq.computed);
                if let Doing::Step { chunks, .. } = &mut self.doing {
                    chunks.retain(|chunk| chunk.0 != slot);
                }
            }
            State::Decode => {
                let now = (self.step - seq.decode_step) as u32;
                self.load.decoding -= 1;
                self.load.context_tokens -= u64::from(seq.decode_context + now);
                seq.generated += now;
            }
            State::Paused => {}
        }
        self.kv.release(&seq.job.blocks[..seq.named], seq.private);
        (seq.named, seq.private, seq.computed) = (0, 0, 0);
        seq.target = seq.job.prompt_tokens + seq.generated;
        seq.stay = self.new_stay();
    }

    /// So many steps have been done: everyone who decodes has a token more for each.
    fn decoded(&mut self, steps: u64) {
        self.step += steps;
        self.load.context_tokens += steps * u64::from(self.load.decoding);
    }

    fn computed(&mut self, slot: u32, tokens: u32, said: &mut Vec<Said>) {
        let Some((_, mut seq)) = self.take(slot) else { return };
        let full = |tokens: u32| (tokens / self.config.block_tokens) as usize;
        seq.computed += tokens;
        self.load.prefilling_tokens -= u64::from(tokens);
        while seq.named < full(seq.computed).min(seq.job.blocks.len()) {
            self.kv.name(seq.job.blocks[seq.named]);
            seq.named += 1;
            seq.private -= 1;
        }
        if seq.computed < seq.target {
            self.seqs[slot as usize] = Some(seq);
            return;
        }
        // The step that ends the prompt gives a token.
        self.queue.remove(&(seq.key, slot));
        self.load.prefilling -= 1;
        if seq.generated == 0 {
            let (request, cached_tokens) = (seq.job.request, seq.cached);
            said.push(Said::First { request, cached_tokens });
        }
        seq.generated += 1;
        if seq.generated >= seq.job.output_tokens {
            self.end(slot, seq, said);
            return;
        }
        seq.state = State::Decode;
        seq.decode_step = self.step;
        seq.decode_context = seq.target + 1;
        self.load.decoding += 1;
        self.load.context_tokens += u64::from(seq.decode_context);
        let left = u64::from(seq.job.output_tokens - seq.generated);
        self.due.push(Reverse((self.step + left, Due::Finish, slot, seq.stay)));
        self.expect_block(slot, &seq);
        self.seqs[slot as usize] = Some(seq);
    }

    /// Notes the step before which a decoding sequence needs a block more.
    fn expect_block(&mut self, slot: u32, seq: &Seq) {
        let holds = (seq.named + seq.private) as u64 * u64::from(self.config.block_tokens);
        let context = u64::from(seq.decode_context) + self.step - seq.decode_step;
        self.due.push(Reverse((
            self.step + holds.saturating_sub(context),
            Due::Block,
            slot,
            seq.stay,
        )));
    }

    fn end(&mut self, slot: u32, seq: Seq, said: &mut Vec<Said>) {
        self.kv.release(&seq.job.blocks[..seq.named], seq.private);
        said.push(Said::Finished {
            request: seq.job.request,
        });
        self.gone(slot, &seq);
    }

    fn gone(&mut self, slot: u32, seq: &Seq) {
        self.staying -= u32::from(seq.stays());
        self.free.push(slot);
    }

    /// What of the batch work that waits is overdue makes way no more, while there is room for it to stay.
    fn stay(&mut self, now_s: f64) {
        while u64::from(self.staying) < slots_to_stay(u64::from(self.config.max_batch)) {
            let Some(&(key, slot)) = self.queue.range((MAKES_WAY, 0)..).next() else {
                return;
            };
            let Some(seq) = self.seqs[slot as usize].as_mut() else {
                return;
            };
            if seq.job.due_s > now_s {
                return;
            }
            self.queue.remove(&(key, slot));
            seq.key = key & !MAKES_WAY;
            self.queue.insert((seq.key, slot));
            self.staying += 1;
        }
    }

    /// Ends answers that have their last token, and gives a block to those that need one.
    fn meet_dues(&mut self, said: &mut Vec<Said>) {
        while let Some(&Reverse((step, what, slot, stay))) = self.due.peek() {
            if step > self.step {
                return;
            }
            self.due.pop();
            let current = self.seqs[slot as usize]
                .as_ref()
                .is_some_and(|seq| seq.stay == stay && seq.state == State::Decode);
            if !current {
                continue;
            }
            let Some((_, mut seq)) = self.take(slot) else { continue };
            if what == Due::Finish {
                self.load.decoding -= 1;
                self.load.context_tokens -= u64::from(seq.decode_context) + self.step - seq.decode_step;
                self.end(slot, seq, said);
                continue;
            }
            if self.kv.grow() {
                seq.private += 1;
                self.expect_block(slot, &seq);
                self.seqs[slot as usize] = Some(seq);
                continue;
            }
            self.seqs[slot as usize] = Some(seq);
            // Again after somebody has given way, unless it is this one.
            self.due.push(Reverse((step, what, slot, stay)));
            self.preempt();
        }
    }

    /// The last in order of those who hold KV gives it up.
    fn preempt(&mut self) {
        if let Some(slot) = self.last_seated() {
            self.put_back(slot);
        }
    }

    fn last_seated(&self) -> Option<u32> {
        let holds = |seq: &Seq| matches!(seq.state, State::Decode | State::Prefill);
        let slots = (0_u32..)
            .zip(&self.seqs)
            .filter_map(|(slot, seq)| seq.as_ref().map(|seq| (slot, seq)));
        let last = slots
            .filter(|(_, seq)| holds(seq))
            .max_by_key(|(slot, seq)| (seq.key, *slot));
        last.map(|(slot, _)| slot)
    }

    fn put_back(&mut self, slot: u32) {
        if let Some((slot, mut seq)) = self.take(slot) {
            self.preemptions += 1;
            self.leave(slot, &mut seq);
            self.wait(slot, seq);
        }
    }

    /// Something changed: a stretch ends at the next boundary, and who was idle begins.
    fn interrupt(&mut self, now_s: f64, said: &mut Vec<Said>) {
        if self.doing == Doing::Nothing {
            self.compose(now_s, said);
        } else {
            self.settle(now_s);
        }
    }

    /// Counts what a stretch has done by now, and leaves of it the step under way.
    fn settle(&mut self, now_s: f64) {
        let Doing::Stretch {
            steps,
            began_s,
            ends_s,
            mut shape,
        } = self.doing
        else {
            return;
        };
        let reaches = |steps| began_s + stretch_s(&self.config, &shape, steps);
        // The fewest steps that reach up to now.
        let (mut low, mut high) = (1, steps);
        while low < high {
            let middle = (low + high) / 2;
            if reaches(middle) >= now_s {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let (began_s, cut_s) = (reaches(low - 1), reaches(low));
        self.busy_s -= ends_s - cut_s;
        self.decoded(low - 1);
        shape.context_tokens = self.load.context_tokens;
        self.doing = Doing::Stretch {
            steps: 1,
            began_s,
            ends_s: cut_s,
            shape,
        };
    }

    /// Chooses what the next step computes.
    fn compose(&mut self, now_s: f64, said: &mut Vec<Said>) {
        self.stay(now_s);
        let mut shape = Shape::decode(self.load.decoding, self.load.context_tokens);
        let mut budget = self.told_budget();
        let mut chunks = Vec::new();
        let mut loaded = 0;
        let mut can_start = true;
        let mut begun = self.load.prefilling;
        let mut at = (0, 0);
        while can_start || begun > 0 {
            let Some(&(key, slot)) = self.queue.range(at..).next() else {
                break;
            };
            at = (key, slot + 1);
            let Some((_, mut seq)) = self.take(slot) else { continue };
            if seq.state == State::Prefill {
                begun -= 1;
            } else {
                if !can_start {
                    self.seqs[slot as usize] = Some(seq);
                    continue;
                }
                let is_open = match &budget {
                    Some(budget) => budget.is_open(),
                    None => self.room(&shape, 0) > 0,
                };
                if !is_open {
                    self.seqs[slot as usize] = Some(seq);
                    break;
                }
                let mut started = self.start(now_s, &mut seq);
                while matches!(started, Started::NoRoom) && !seq.makes_way() {
                    // The last batch work makes way.
                    let is_batch = |slot: &u32| self.seqs[*slot as usize].as_ref().is_some_and(Seq::makes_way);
                    let Some(slot) = self.last_seated().filter(is_batch) else {
                        break;
                    };
                    let prefilling = self.load.prefilling;
                    self.put_back(slot);
                    begun -= prefilling - self.load.prefilling;
                    (shape.decodes, shape.context_tokens) = (self.load.decoding, self.load.context_tokens);
                    started = self.start(now_s, &mut seq);
                }
                match started {
                    Started::Yes(blocks) => loaded += blocks,
                    Started::NoRoom => can_start = false,
                    Started::Hopeless => {
                        said.push(Said::Shed {
                            request: seq.job.request,
                        });
                        self.leave(slot, &mut seq);
                        self.gone(slot, &seq);
                        continue;
                    }
                }
                if !can_start {
                    self.seqs[slot as usize] = Some(seq);
                    // Those behind that have begun may go on.
                    continue;
                }
            }
            let left = seq.target - seq.computed;
            let tokens = match &mut budget {
                Some(budget) => budget.take(left, seq.computed),
                None => self.room(&shape, seq.computed).min(left),
            };
            if tokens > 0 {
                shape = shape.with_chunk(tokens, seq.computed);
                chunks.push((slot, tokens));
            }
            let whole = tokens == left;
            self.seqs[slot as usize] = Some(seq);
            if !whole {
                break;
            }
        }
        if shape == Shape::default() {
            return;
        }
        if chunks.is_empty() {
            let next = self.due.peek().map_or(self.step + 1, |due| due.0 .0);
            let steps = (next.saturating_sub(self.step)).max(1);
            let ends_s = now_s + stretch_s(&self.config, &shape, steps);
            self.report(&shape, stretch_s(&self.config, &shape, 1));
            self.busy_s += ends_s - now_s;
            self.doing = Doing::Stretch {
                steps,
                began_s: now_s,
                ends_s,
                shape,
            };
            return;
        }
        let step_ms = self.config.table.step_ms(&shape) + loaded as f64 * self.config.host_block_ms;
        let duration_s = step_ms * self.config.slowdown / 1000.0;
        self.report(&shape, duration_s);
        self.busy_s += duration_s;
        self.doing = Doing::Step {
            chunks,
            ends_s: now_s + duration_s,
        };
    }

    fn report(&mut self, shape: &Shape, duration_s: f64) {
        if self.steps.len() < STEPS_REPORTED {
            self.steps.push(StepReport {
                prefill_tokens: shape.chunk_tokens,
                prefill_pairs: shape.chunk_pairs,
                decode_tokens: shape.decodes,
                context_tokens: shape.context_tokens,
                duration_s,
            });
        }
    }

    /// What of prompts the next step may take where the scheduler says so.
    fn told_budget(&self) -> Option<StepBudget> {
        if self.config.chunk != Chunk::Scheduler {
            return None;
        }
        let limits = ChunkLimits {
            told: self.chunk_tokens,
            own: self.config.chunk_tokens,
            idle: self.config.chunk_tokens,
            pair_tokens: self.pair_tokens,
        };
        let running = self.load.decoding + self.load.prefilling;
        let may_begin = self.load.waiting.min(self.config.max_batch.saturating_sub(running));
        Some(StepBudget::new(
            limits,
            self.load.decoding,
            self.load.prefilling + may_begin,
        ))
    }

    /// Prompt tokens that the step has room for by the worker's own rule, of a prompt with `computed` before them.
    fn room(&self, shape: &Shape, computed: u32) -> u32 {
        match self.config.chunk {
            Chunk::Fixed(tokens) => tokens.saturating_sub(shape.decodes + shape.chunk_tokens),
            Chunk::Scheduler => 0,
            Chunk::Dynamic => {
                let target_ms = STEP_SHARE * self.config.tpot_target_s * 1000.0 / self.config.slowdown;
                let floor = CHUNK_FLOOR.saturating_sub(shape.chunk_tokens);
                let most = self.config.chunk_tokens.saturating_sub(shape.chunk_tokens);
                self.cost.chunk_tokens(shape, computed, target_ms, floor, most)
            }
        }
    }

    fn start(&mut self, now_s: f64, seq: &mut Seq) -> Started {
        let block_tokens = self.config.block_tokens;
        // At least one token has to be computed, to give the next.
        let reusable = ((seq.target - 1) / block_tokens) as usize;
        let blocks = Arc::clone(&seq.job.blocks);
        let reusable = &blocks[..reusable.min(blocks.len())];
        if self.config.shed && !seq.started {
            let cached = self.kv.leading(reusable) as u32 * block_tokens;
            let prefill_s = self.cost.prefill_ms(seq.target - cached, cached) * self.config.slowdown / 1000.0;
            if now_s + SHED_MARGIN * prefill_s > seq.job.due_s {
                return Started::Hopeless;
            }
        }
        let running = self.load.decoding + self.load.prefilling;
        if running >= self.config.max_batch {
            return Started::NoRoom;
        }
        let total = (seq.target + 1).div_ceil(block_tokens) as usize;
        let watermark = (WATERMARK * self.kv.device_blocks() as f64).ceil() as usize;
        // Whoever is alone may have everything.
        let spare = if running == 0 { 0 } else { watermark };
        let Some(start) = self.kv.start(reusable, total, spare) else {
            return Started::NoRoom;
        };
        self.load.waiting -= 1;
        self.load.waiting_tokens -= u64::from(seq.target);
        seq.named = start.named;
        seq.private = start.private;
        seq.computed = start.named as u32 * block_tokens;
        if !seq.started || seq.generated == 0 {
            seq.cached = seq.computed.min(seq.job.prompt_tokens);
        }
        if seq.job.has_kv {
            // Once: what is pushed out is computed again.
            seq.job.has_kv = false;
            seq.computed = seq.target - 1;
        }
        seq.started = true;
        seq.state = State::Prefill;
        self.load.prefilling += 1;
        self.load.prefilling_tokens += u64::from(seq.target - seq.computed);
        Started::Yes(start.loaded)
    }
}

enum Started {
    /// With so many blocks loaded from the host.
    Yes(usize),
    NoRoom,
    Hopeless,
}

/// So many steps that only decode: everyone's context grows by one each.
fn stretch_s(config: &EngineConfig, shape: &Shape, steps: u64) -> f64 {
    let (count, decodes) = (steps as f64, f64::from(shape.decodes));
    let first_ms = config.table.step_ms(shape);
    let grown = decodes * count * (count - 1.0) / 2.0;
    (count * first_ms + config.table.context_token_ms * grown) * config.slowdown / 1000.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config() -> EngineConfig {
        EngineConfig {
            table: Arc::new(CostTable::named("a100-llama3-8b").expect("built in")),
            slowdown: 1.0,
            max_batch: 256,
            chunk: Chunk::Dynamic,
            chunk_tokens: CHUNK_MOST,
            tpot_target_s: 0.1,
            order: Order::Fcfs,
            shed: false,
            block_tokens: 16,
            kv_blocks: 0,
            host_blocks: 0,
            host_block_ms: HOST_BLOCK_MS,
        }
    }

    fn job(request: u32, arrival_s: f64, prompt_tokens: u32, output_tokens: u32) -> Job {
        Job {
            request,
            prompt_tokens,
            output_tokens,
            blocks: Arc::from([]),
            arrival_s,
            due_s: arrival_s + 2.0,
            expected_output_tokens: output_tokens,
            is_batch: false,
            may_shed: true,
            has_kv: false,
        }
    }

    /// Runs jobs to their end; what each said, and when.
    fn run(engine: &mut Engine, jobs: &[Job]) -> Vec<(f64, Said)> {
        let (mut all, mut said, mut next) = (Vec::new(), Vec::new(), 0);
        loop {
            let due_s = engine.busy_until().unwrap_or(f64::INFINITY);
            let now_s = match jobs.get(next) {
                Some(job) if job.arrival_s <= due_s => {
                    engine.submit(job.arrival_s, job.clone(), &mut said);
                    next += 1;
                    job.arrival_s
                }
                _ if due_s.is_finite() => {
                    engine.advance(due_s, &mut said);
                    due_s
                }
                _ => return all,
            };
            all.extend(said.drain(..).map(|each| (now_s, each)));
        }
    }

    fn at(said: &[(f64, Said)], wanted: impl Fn(&Said) -> bool) -> f64 {
        said.iter().find(|(_, each)| wanted(each)).expect("said").0
    }

    #[test]
    fn batch_work_makes_way_but_for_what_is_overdue() {
        let limited = EngineConfig {
            max_batch: 4,
            order: Order::Edf,
            ..config()
        };
        let batch = |number: u32, due_s: f64| Job {
            is_batch: true,
            due_s,
            ..job(number, 0.0, 64, 2000)
        };
        let other = |number: u32, at_s: f64| job(number, at_s, 64, 20);
        let first_s = |said: &[(f64, Said)], number: u32| {
            at(
                said,
                |each| matches!(each, Said::First { request, .. } if *request == number),
            )
        };
        let mut engine = Engine::new(limited.clone());
        let mut jobs: Vec<Job> = (0..6).map(|number| batch(number, 60.0)).collect();
        jobs.extend((10..13).map(|number| other(number, 1.0)));
        let said = run(&mut engine, &jobs);
        assert!((10..13).all(|number| first_s(&said, number) < 1.2), "no slot was free");
        assert!(engine.preemptions() >= 3);
        // All that is overdue would be due before those who come later; one of four slots is for it.
        let mut engine = Engine::new(limited);
        let mut jobs: Vec<Job> = (0..6).map(|number| batch(number, 0.5)).collect();
        jobs.extend((10..14).map(|number| other(number, 1.0)));
        let said = run(&mut engine, &jobs);
        assert!((10..13).all(|number| first_s(&said, number) < 1.2));
        let ended = |number: u32| at(&said, |each| *each == Said::Finished { request: number });
        assert!(first_s(&said, 13) > (10..13).map(ended).fold(f64::MAX, f64::min));
    }

    #[test]
    fn one_request_takes_what_the_table_says() {
        let mut engine = Engine::new(config());
        let said = run(&mut engine, &[job(0, 1.0, 400, 11)]);
        let table = engine.config.table.clone();
        let first_s = 1.0 + table.step_ms(&Shape::default().with_chunk(400, 0)) / 1000.0;
        let rest_s: f64 = (401..411)
            .map(|context| table.step_ms(&Shape::decode(1, context)) / 1000.0)
            .sum();
        assert!((at(&said, |each| matches!(each, Said::First { .. })) - first_s).abs() < 1e-9);
        assert!((at(&said, |each| matches!(each, Said::Finished { .. })) - first_s - rest_s).abs() < 1e-9);
        assert_eq!((engine.iteration(), engine.kv.used()), (11, 0));
        assert!((engine.busy_s() - (first_s - 1.0) - rest_s).abs() < 1e-9);
    }

    #[test]
    fn chunks_keep_steps_within_the_target() {
        let mut engine = Engine::new(config());
        let mut said = Vec::new();
        engine.submit(0.0, job(0, 0.0, 100, 400), &mut said);
        let mut now_s = 0.0;
        for number in 1..4 {
            now_s = engine.busy_until().expect("busy");
            engine.advance(now_s, &mut said);
            engine.submit(now_s, job(number, now_s, 20_000, 50), &mut said);
        }
        while let Some(ends_s) = engine.busy_until() {
            if let Doing::Step { .. } = engine.doing {
                assert!(ends_s - now_s <= 0.09 + 1e-9, "{}", ends_s - now_s);
            }
            now_s = ends_s;
            engine.advance(now_s, &mut said);
        }
        let finished = said.iter().filter(|each| matches!(each, Said::Finished { .. })).count();
        assert_eq!(finished, 4);
    }

    #[test]
    fn a_newcomer_waits_for_one_step_not_for_a_stretch() {
        let mut engine = Engine::new(config());
        let said = run(&mut engine, &[job(0, 0.0, 100, 1000), job(1, 2.0, 100, 2)]);
        let first_s = at(&said, |each| matches!(each, Said::First { request: 1, .. }));
        assert!(first_s < 2.0 + 0.010 + 0.020, "{first_s}");
        assert!(first_s > 2.0 + 0.010, "{first_s}");
    }

    #[test]
    fn what_was_computed_is_not_computed_again() {
        let mut engine = Engine::new(config());
        let blocks: Arc<[u64]> = (0..62).collect();
        let jobs: Vec<Job> = [(0, 0.0), (1, 5.0)]
            .map(|(request, at_s)| Job {
                blocks: Arc::clone(&blocks),
                ..job(request, at_s, 1000, 5)
            })
            .to_vec();
        let said = run(&mut engine, &jobs);
        let cached = |number| {
            let found = said.iter().find_map(|(_, each)| match each {
                Said::First { request, cached_tokens } if *request == number => Some(*cached_tokens),
                _ => None,
            });
            found.expect("said")
        };
        assert_eq!((cached(0), cached(1)), (0, 992));
    }

    #[test]
    fn without_kv_the_last_gives_way_and_all_finish() {
        let mut engine = Engine::new(EngineConfig {
            kv_blocks: 40,
            ..config()
        });
        let jobs: Vec<Job> = (0..4).map(|number| job(number, 0.0, 100, 400)).collect();
        let said = run(&mut engine, &jobs);
        let finished = said
            .iter()
            .filter(|(_, each)| matches!(each, Said::Finished { .. }))
            .count();
        assert_eq!(finished, 4);
        assert!(engine.preemptions() > 0);
        assert_eq!((engine.kv.used(), engine.load()), (0, EngineLoad::default()));
    }

    #[test]
    fn what_can_not_be_in_time_is_given_up_and_only_then() {
        let mut engine = Engine::new(EngineConfig {
            shed: true,
            order: Order::Edf,
            ..config()
        });
        let jobs: Vec<Job> = (0..20).map(|number| job(number, 0.0, 4000, 5)).collect();
        let said = run(&mut engine, &jobs);
        let count = |wanted: &dyn Fn(&Said) -> bool| said.iter().filter(|(_, each)| wanted(each)).count();
        let (shed, done) = (
            count(&|each| matches!(each, Said::Shed { .. })),
            count(&|each| matches!(each, Said::Finished { .. })),
        );
        assert_eq!(shed + done, 20);
        // 4,000 tokens take some 0.3 s.
        assert!((4..9).contains(&done), "{done}");
        let late = said
            .iter()
            .filter(|(at_s, each)| matches!(each, Said::First { .. }) && *at_s > 2.0)
            .count();
        assert_eq!(late, 0);
    }

    #[test]
    fn a_killed_worker_names_what_it_lost_and_starts_empty() {
        let mut engine = Engine::new(config());
        let mut said = Vec::new();
        engine.submit(0.0, job(5, 0.0, 100, 400), &mut said);
        while let Some(ends_s) = engine.busy_until().filter(|ends_s| *ends_s <= 1.0) {
            engine.advance(ends_s, &mut said);
        }
        // In the middle of a stretch; a step takes 10 ms.
        let lost = engine.kill(1.0);
        assert_eq!(lost.len(), 1);
        assert!(lost[0].0 == 5 && (97..101).contains(&lost[0].1), "{lost:?}");
        assert_eq!(
            (engine.load(), engine.kv.used(), engine.busy_until()),
            (EngineLoad::default(), 0, None)
        );
    }

    #[test]
    fn a_paused_request_goes_on_where_it_was() {
        let mut engine = Engine::new(config());
        let mut said = Vec::new();
        engine.submit(0.0, job(1, 0.0, 100, 50), &mut said);
        let ends_s = engine.busy_until().expect("busy");
        engine.advance(ends_s, &mut said);
        engine.pause(ends_s + 0.1, 1, &mut said);
        while let Some(ends_s) = engine.busy_until() {
            engine.advance(ends_s, &mut said);
        }
        assert_eq!((engine.kv.used(), engine.load()), (0, EngineLoad::default()));
        engine.resume(9.0, 1, &mut said);
        while let Some(ends_s) = engine.busy_until() {
            engine.advance(ends_s, &mut said);
        }
        let firsts = said.iter().filter(|each| matches!(each, Said::First { .. })).count();
        assert_eq!((firsts, said.last()), (1, Some(&Said::Finished { request: 1 })));
    }

    proptest! {
        /// By any order, chunk and size of KV: every request that fits ends once, nothing is left over, a step of two
        /// requests is never quicker than the table's for one, and a fixed chunk is kept.
        #[test]
        fn every_request_ends_once(
            jobs in prop::collection::vec((0.0_f64..3.0, 1_u32..600, 1_u32..80, 0_u64..3), 1..40),
            kv_blocks in 50_u32..120, host_blocks in 0_u32..40, max_batch in 1_u32..12, order in 0_u8..4, chunk in 0_u8..3,
        ) {
            let mut engine = Engine::new(EngineConfig {
                kv_blocks, host_blocks, max_batch,
                order: [Order::Fcfs, Order::Edf, Order::Sjf, Order::ShortestOutput][order as usize],
                chunk: [Chunk::Fixed(64), Chunk::Dynamic, Chunk::Scheduler][chunk as usize],
                ..config()
            });
            let mut jobs: Vec<Job> = (0..).zip(jobs).map(|(number, (at_s, prompt, output, root))| Job {
                blocks: (0..u64::from(prompt / 16)).map(|depth| root * 1000 + depth).collect(),
                is_batch: (prompt + output) % 3 == 0,
                ..job(number, at_s, prompt, output)
            }).collect();
            jobs.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
            let said = run(&mut engine, &jobs);
            for job in &jobs {
                let firsts: Vec<f64> = said.iter().filter(|(_, each)| matches!(each, Said::First { request, .. } if *request == job.request)).map(|each| each.0).collect();
                let ends: Vec<f64> = said.iter().filter(|(_, each)| matches!(each, Said::Finished { request } if *request == job.request)).map(|each| each.0).collect();
                prop_assert_eq!((firsts.len(), ends.len()), (1, 1));
                let fastest_s = engine.config.table.linear_ms(1) / 1000.0;
                prop_assert!(ends[0] - job.arrival_s >= fastest_s * f64::from(job.output_tokens) - 1e-9);
                prop_assert!(firsts[0] > job.arrival_s && ends[0] >= firsts[0]);
            }
            prop_assert_eq!((engine.load(), engine.staying), (EngineLoad::default(), 0));
            prop_assert_eq!(engine.kv.used(), 0);
        }
    }
}
