//! Room on workers that the scheduler has lent to this router: placing within it needs no question.
//!
//! The rules are `headrace_core::credits`'; here they meet the wire.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use headrace_core::{
    blocks::Blocks,
    credits::{Holder, Outlook, Prompt, Room, Taken},
    index::{marks, Expected, Overlap, WorkerId},
    scheduler::{events::Link, leases::expected_kv_tokens},
};
use parking_lot::RwLock;
use rand::{rngs::SmallRng, SeedableRng};

use crate::proto::{place_request::Ask, share::Grantor, Grant, PlacementReason, Share};

/// Leases that a router makes are told apart from the scheduler's by this bit.
const OWN_LEASE: u64 = 1 << 63;

/// Holders of a prompt's beginning that are looked at beside those that are drawn.
const MAX_HOLDERS: usize = 32;

/// Who holds which prefix blocks, as the cache tells: read for each request, written in short parts.
pub type SharedBlocks = Arc<RwLock<Blocks>>;

/// What this router holds.
pub struct Shares {
    holder: Holder,
    workers: HashMap<Link, Worker>,
    blocks: SharedBlocks,
    /// By their numbers there.
    links: HashMap<WorkerId, Link>,
    /// What workers will hold because of what was placed here, and still runs.
    expected: Expected,
    overlaps: Vec<Overlap>,
    rng: SmallRng,
    /// Counts up from anywhere: other routers count elsewhere.
    next_lease: u64,
}

struct Worker {
    grantor: Arc<Grantor>,
    pool: Arc<str>,
    number: WorkerId,
}

/// What a request that was placed here takes, until it ends.
pub struct Placed {
    taken: Taken,
    /// The worker's number, and the marks of what of the prompt it did not hold.
    number: WorkerId,
    blocks: Vec<u64>,
}

impl Placed {
    /// Where it runs.
    pub fn worker(&self) -> Link {
        self.taken.worker
    }
}

impl Shares {
    /// Nothing yet.
    pub fn new(blocks: SharedBlocks) -> Self {
        Self {
            holder: Holder::default(),
            workers: HashMap::new(),
            blocks,
            links: HashMap::new(),
            expected: Expected::default(),
            overlaps: Vec::new(),
            rng: SmallRng::from_os_rng(),
            next_lease: rand::random(),
        }
    }

    /// A new stream begins: shares of the last one are void.
    pub fn reset(&mut self) {
        self.holder.reset();
        let workers: Vec<_> = self.workers.drain().collect();
        workers.into_iter().for_each(|(_, worker)| self.forget(&worker));
    }

    fn forget(&mut self, worker: &Worker) {
        self.links.remove(&worker.number);
        self.expected.clear(worker.number);
        self.blocks.write().give_back(&worker.grantor.instance_id);
    }

    /// Takes in a share, or news of a worker. True when the scheduler should hear that it is known.
    pub fn receive(&mut self, share: Share) -> bool {
        if share.gone {
            if let Some(worker) = self.workers.remove(&share.worker) {
                self.forget(&worker);
                let (pool, nothing) = (worker.pool, Outlook::default());
                self.holder.receive(0, share.worker, &pool, Room::NONE, nothing);
            }
            return false;
        }
        if let Some(grantor) = share.grantor {
            let pool = grantor.pool.as_str().into();
            let number = self.blocks.write().claim(&grantor.instance_id.as_str().into());
            let grantor = Arc::new(grantor);
            self.links.insert(number, share.worker);
            let worker = Worker { grantor, pool, number };
            self.workers.insert(share.worker, worker);
        }
        let Some(worker) = self.workers.get(&share.worker) else {
            return false;
        };
        let outlook = Outlook {
            pending_prefill_ms: share.pending_prefill_ms.into(),
            prefill_ms_per_token: share.prefill_ms_per_token.into(),
            decoding: share.decoding,
            waiting: share.waiting,
            ahead_ms: share.ahead_ms.map(f64::from),
            ask_from_tokens: share.ask_from_tokens,
        };
        if share.number == 0 {
            self.holder.hear(share.worker, outlook);
            return false;
        }
        let room = Room {
            choices: share.choices,
            kv_tokens: share.kv_tokens,
        };
        self.holder
            .receive(share.number, share.worker, &worker.pool, room, outlook);
        true
    }

    /// The last share that is known.
    pub fn known(&self) -> u64 {
        self.holder.known()
    }

    /// Places a request in the first of its pools that has room for it; None when it has to be asked for.
    pub fn place(&mut self, ask: &Ask) -> Option<(Grant, Placed)> {
        let choices = ask.n.max(1);
        let room = Room {
            choices: choices.into(),
            kv_tokens: expected_kv_tokens(ask.prompt_tokens, choices, ask.max_tokens, ask.expected_output_tokens),
        };
        let avoided = |worker: &Worker| ask.avoid_instances.contains(&worker.grantor.instance_id);
        let avoid: BTreeSet<Link> = match ask.avoid_instances.is_empty() {
            true => BTreeSet::new(),
            false => {
                let workers = self.workers.iter().filter(|(_, worker)| avoided(worker));
                workers.map(|(&link, _)| link).collect()
            }
        };
        // The first pool only: whether a later one will do is the scheduler's to say.
        let pool = ask.pools.first()?;
        let hits = self.hits(ask);
        let taken = self.holder.place(
            pool,
            Prompt {
                tokens: ask.prompt_tokens,
                may_part: ask.may_part,
            },
            room,
            &hits,
            &avoid,
            &mut self.rng,
        )?;
        let Some(worker) = self.workers.get(&taken.worker) else {
            self.holder.give_back(taken);
            return None;
        };
        let held = taken.why.hit_tokens.div_ceil(worker.grantor.block_tokens.max(1)) as usize;
        let blocks = marks(&ask.block_hashes, held);
        self.expected.add(worker.number, &blocks);
        self.next_lease = self.next_lease.wrapping_add(1);
        let grant = Grant {
            lease: self.next_lease | OWN_LEASE,
            worker_id: worker.grantor.worker_id.clone(),
            instance_id: worker.grantor.instance_id.clone(),
            address: worker.grantor.address.clone(),
            reason: Some(PlacementReason::from(taken.why)),
            pool: worker.grantor.pool.clone(),
            ..Grant::default()
        };
        let number = worker.number;
        Some((grant, Placed { taken, number, blocks }))
    }

    /// Workers that hold some of a prompt, or will, and how many tokens of it; those with the most of it.
    fn hits(&mut self, ask: &Ask) -> BTreeMap<Link, u32> {
        let overlaps = &mut self.overlaps;
        overlaps.clear();
        self.expected
            .overlap(self.blocks.read().index(), &ask.block_hashes, overlaps);
        if overlaps.len() > MAX_HOLDERS {
            overlaps.select_nth_unstable_by_key(MAX_HOLDERS, |each| std::cmp::Reverse(each.blocks));
            overlaps.truncate(MAX_HOLDERS);
        }
        let hit = |overlap: &Overlap| {
            let link = *self.links.get(&overlap.worker)?;
            let block_tokens = self.workers.get(&link)?.grantor.block_tokens;
            // At least the last token is computed.
            let most = ask.prompt_tokens.saturating_sub(1);
            Some((link, (overlap.blocks * block_tokens).min(most)))
        };
        overlaps.iter().filter_map(hit).collect()
    }

    /// A request that was placed here has ended.
    pub fn give_back(&mut self, placed: Placed) {
        // What is expected of a worker that has gone went with it, and so it did with the stream.
        if self.holder.knows(&placed.taken) && self.links.get(&placed.number) == Some(&placed.taken.worker) {
            self.expected.remove(placed.number, &placed.blocks);
        }
        self.holder.give_back(placed.taken);
    }
}
