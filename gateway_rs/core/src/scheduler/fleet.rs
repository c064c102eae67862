//! What we believe of each worker, and since when.
//!
//! Load is the set of leases held for a worker *instance*, never a number moved by hand: `leases.rs` has that set and the
//! only place where its sums are written. A worker that restarts is a new instance with an empty set. What workers report
//! refines the belief (prompts already computed, KV shared between requests) but does not replace it: a report is always a
//! little old.
//!
//! What this module leaves to others: the search for a worker (`search.rs`), whose turn it is, and all answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    events::{Ask, BlockChange, Class, LeaseId, Link, Load, WorkerHello, WorkerState},
    kinds::Kinds,
    leases::{Lease, Phase},
    map::{Key, Map},
    pool::{common, Identity, Order, Pool, PoolView},
    preemption::MAX_PREEMPTED,
    queue::Plan,
    worker::Worker,
};
use crate::{
    blocks::Blocks,
    credits::Room,
    index::{Expected, Overlap, NO_BLOCK},
};

/// Blocks that a worker which does not report its blocks is believed to hold, when it does not say how many it has.
const BELIEVED_BLOCKS: usize = 4096;

/// All workers and all leases.
#[derive(Debug)]
pub struct Fleet {
    /// By name.
    pub pools: BTreeMap<Arc<str>, Pool>,
    /// By their streams.
    pub workers: BTreeMap<Link, Worker>,
    /// By number.
    pub leases: Map<LeaseId, Lease>,
    /// Routers must be told.
    pub changed: bool,
    /// Moves with each change that routers must be told of.
    pub version: u64,
    /// What work costs.
    pub kinds: Kinds,
    /// Workers that were looked at, over all searches.
    pub looked_at: u64,
    pub(super) blocks: Blocks,
    /// What workers will hold because of what they were given, or will be.
    pub(super) expected: Expected,
    /// Workers by their numbers in the index.
    pub(super) numbers: Map<u32, Link>,
    pub(super) instances: Map<Arc<str>, Link>,
    pub(super) queue_factor: f64,
    /// Batch requests give way.
    pub(super) preempt: bool,
    pub(super) overlaps: Vec<Overlap>,
    /// Leases announced for instances that have not joined (yet): a scheduler that comes back hears from routers and workers
    /// in any order.
    pub(super) unjoined: Map<Arc<str>, BTreeSet<LeaseId>>,
}

impl Fleet {
    pub(super) fn new(queue_factor: f64, preempt: bool) -> Self {
        Self {
            pools: BTreeMap::new(),
            workers: BTreeMap::new(),
            leases: Map::default(),
            changed: false,
            version: 0,
            kinds: Kinds::default(),
            looked_at: 0,
            blocks: Blocks::default(),
            expected: Expected::default(),
            numbers: Map::default(),
            instances: Map::default(),
            queue_factor,
            preempt,
            overlaps: Vec::new(),
            unjoined: Map::default(),
        }
    }

    /// The worker of that instance, if it is here.
    pub fn instance(&self, instance_id: &str) -> Option<&Worker> {
        self.workers.get(self.instances.get(instance_id)?)
    }

    /// Takes in a worker whose description fits its pool's.
    pub(super) fn join(&mut self, now_s: f64, link: Link, hello: WorkerHello) {
        let kind = self.kinds.of(&hello.description);
        self.kinds.says_kv(kind, hello.kv_token_bytes);
        let number = self.blocks.claim(&hello.instance_id);
        self.numbers.insert(number, link);
        let mut worker = Worker::new(link, hello, now_s, self.queue_factor, number, kind);
        let waiting = self.unjoined.remove(&worker.hello.instance_id).unwrap_or_default();
        for lease in waiting.iter().filter_map(|id| self.leases.get(id)) {
            self.expected.add(number, &lease.blocks);
            worker.held.add(lease);
            worker.unreported.add(lease);
        }
        let hello = &worker.hello;
        self.instances.insert(hello.instance_id.clone(), link);
        let pool = self.pools.entry(hello.pool.clone()).or_insert_with(|| Pool {
            name: hello.pool.clone(),
            identity: Identity::of(&hello.description),
            workers: BTreeSet::new(),
            ready: BTreeSet::new(),
            preempt: self.preempt,
            slots: 0,
            staying: 0,
            orders: BTreeMap::new(),
            at: Map::default(),
            makes_way: Order::default(),
            max_prompt_tokens: 0,
            serve: BTreeMap::new(),
            serve_prompts: BTreeMap::new(),
        });
        pool.workers.insert(link);
        self.workers.insert(link, worker);
        self.touch();
    }

    /// How a worker's description differs from its pool's; empty = it fits.
    pub(super) fn contradiction(&self, hello: &WorkerHello) -> String {
        self.pools
            .get(&hello.pool)
            .map(|pool| pool.identity.difference(&Identity::of(&hello.description)))
            .unwrap_or_default()
    }

    /// The instances that say they listen there. Joins are rare, so going through all is fine.
    pub(super) fn at_address(&self, address: &str) -> Vec<Link> {
        self.workers
            .values()
            .filter(|worker| &*worker.hello.address == address)
            .map(|worker| worker.link)
            .collect()
    }

    /// The worker is gone, and its leases with it; returns both.
    pub(super) fn remove(&mut self, link: Link) -> Option<(Worker, Vec<Lease>)> {
        let mut worker = self.workers.remove(&link)?;
        self.instances.remove(&worker.hello.instance_id);
        self.kinds.leave(worker.kind);
        self.numbers.remove(&worker.number);
        self.expected.clear(worker.number);
        self.blocks.give_back(&worker.hello.instance_id);
        worker.load.state = WorkerState::Unhealthy;
        if let Some(pool) = self.pools.get_mut(&worker.hello.pool) {
            pool.leave_order(link);
            pool.makes_way.remove(link);
            pool.workers.remove(&link);
            pool.refresh_ready(&mut worker);
            if pool.workers.is_empty() {
                self.pools.remove(&worker.hello.pool);
            }
        }
        let ids: Vec<_> = worker
            .held
            .ids()
            .chain(worker.aside.iter().map(|&(_, id)| id))
            .collect();
        let leases: Vec<Lease> = ids.into_iter().filter_map(|id| self.leases.remove(&id)).collect();
        if let Some(pool) = self.pools.get_mut(&worker.hello.pool) {
            pool.staying -= leases.iter().filter(|lease| lease.stays).count() as u64;
        }
        self.touch();
        Some((worker, leases))
    }

    /// Takes in a report; true when what the pool can serve changed. What was granted up to `lag_s` ago may not be in it.
    pub(super) fn report(&mut self, now_s: f64, link: Link, load: Load, lag_s: f64) -> bool {
        let Some(worker) = self.workers.get_mut(&link) else {
            return false;
        };
        self.kinds.observe(worker.kind, &mut worker.drift, &load.steps);
        worker.pace = worker.drift.pace;
        self.kinds.moved(
            worker.kind,
            load.kv_received_bytes.saturating_sub(worker.load.kv_received_bytes),
            load.kv_receive_s - worker.load.kv_receive_s,
        );
        worker.load = load;
        worker.load.steps = Vec::new();
        worker.heard_s = now_s;
        worker.derive(self.queue_factor);
        while let Some((granted_s, id)) = worker.unreported.oldest() {
            if granted_s >= now_s - lag_s {
                break;
            }
            let Some(lease) = self.leases.get(&id) else {
                break;
            };
            worker.unreported.discard(lease);
        }
        worker.believe_prompts(now_s, &self.kinds, &mut self.leases);
        let Some(pool) = self.pools.get_mut(&worker.hello.pool) else {
            return false;
        };
        pool.reorder(worker);
        let changed = pool.refresh_ready(worker);
        if changed {
            self.touch();
        }
        changed
    }

    /// A lease begins, now.
    pub(super) fn hold(&mut self, now_s: f64, lease: Lease) {
        match self.instances.get(&lease.instance_id) {
            None => {
                self.unjoined
                    .entry(lease.instance_id.clone())
                    .or_default()
                    .insert(lease.id);
            }
            Some(&link) => {
                if let Some(worker) = self.workers.get_mut(&link) {
                    worker.held.add(&lease);
                    if lease.phase == Phase::Arriving {
                        worker.arriving.add(&lease);
                    } else {
                        worker.unreported.add(&lease);
                    }
                    self.expected.add(worker.number, &lease.blocks);
                    if lease.phase == Phase::Prefill {
                        worker.begin_prefill(now_s, &lease);
                    }
                    if let Some(pool) = self.pools.get_mut(&worker.hello.pool).filter(|_| lease.stays) {
                        pool.staying += 1;
                    }
                }
                self.reorder(link);
            }
        }
        self.leases.insert(lease.id, lease);
    }

    /// The prompt of a lease has been computed, or so many tokens have been said; returns its worker when that is news.
    pub(super) fn progress(&mut self, now_s: f64, id: LeaseId, output_tokens: u32) -> Option<Link> {
        let lease = self.leases.get_mut(&id)?;
        lease.output_tokens = lease.output_tokens.max(output_tokens);
        if lease.phase == Phase::Arriving {
            self.arrived(now_s, id);
            return None;
        }
        if lease.phase != Phase::Prefill {
            return None;
        }
        lease.phase = Phase::Decode;
        let link = *self.instances.get(&lease.instance_id)?;
        let worker = self.workers.get_mut(&link)?;
        if worker.end_prefill(lease) {
            worker.bound_prefill(now_s);
        }
        self.reorder(link);
        Some(link)
    }

    /// The KV of a lease is there: from now on reports tell of it.
    fn arrived(&mut self, now_s: f64, id: LeaseId) {
        let Some(lease) = self.leases.get_mut(&id) else {
            return;
        };
        let link = self.instances.get(&lease.instance_id);
        if let Some(worker) = link.and_then(|link| self.workers.get_mut(link)) {
            worker.held.discard(lease);
            worker.arriving.discard(lease);
            // As if it began now: no report before this one knows of it.
            lease.granted_s = now_s;
            worker.held.add(lease);
            worker.unreported.add(lease);
        }
        lease.phase = Phase::Decode;
    }

    /// An ask waits here for that worker, or does not any more; these are the marks of what the worker did not hold.
    pub(super) fn plan(&mut self, now_s: f64, class: Class, plan: &Plan, blocks: &[u64], waits: bool) {
        let Some(worker) = self.workers.get_mut(&plan.worker) else {
            return;
        };
        if waits {
            self.expected.add(worker.number, blocks);
        } else {
            self.expected.remove(worker.number, blocks);
        }
        worker.plan(now_s, class, plan, waits);
        worker.note_idle(now_s);
        self.reorder(plan.worker);
    }

    /// A request is put aside: it holds no slot and no KV.
    pub(super) fn put_aside(&mut self, now_s: f64, id: LeaseId) {
        let Some(lease) = self.leases.get_mut(&id) else {
            return;
        };
        let Some(&link) = self.instances.get(&lease.instance_id) else {
            return;
        };
        let Some(worker) = self.workers.get_mut(&link) else {
            return;
        };
        worker.held.discard(lease);
        worker.unreported.discard(lease);
        if lease.phase == Phase::Decode {
            lease.preempted += 1;
            if lease.preempted >= MAX_PREEMPTED {
                may_stay(&mut self.pools, &worker.hello.pool, lease);
            }
            // Until the next report knows. One that waits holds none that could be told.
            worker.reported_kv_tokens = worker.reported_kv_tokens.saturating_sub(lease.kv_tokens);
        } else {
            worker.drop_prefill(now_s, lease);
        }
        worker.note_idle(now_s);
        lease.phase = Phase::Aside;
        worker.aside.insert((Key(now_s), id));
        self.reorder(link);
    }

    /// It gives way to nobody any more, if there are not too many such.
    pub(super) fn stay(&mut self, link: Link, id: LeaseId) -> bool {
        let (Some(lease), Some(worker)) = (self.leases.get_mut(&id), self.workers.get(&link)) else {
            return false;
        };
        may_stay(&mut self.pools, &worker.hello.pool, lease)
    }

    /// It goes on: what it had said is computed again with its prompt.
    pub(super) fn go_on(&mut self, now_s: f64, link: Link, id: LeaseId) {
        let (Some(lease), Some(worker)) = (self.leases.get_mut(&id), self.workers.get_mut(&link)) else {
            return;
        };
        worker.aside.retain(|&(_, aside)| aside != id);
        // As if it began now: no report before this one knows of it.
        lease.granted_s = now_s;
        lease.phase = Phase::Prefill;
        lease.uncached_tokens = lease.prompt_tokens + lease.output_tokens;
        lease.prefill_ms = self
            .kinds
            .prefill_ms(worker.kind, worker.pace, lease.uncached_tokens, 0);
        worker.held.add(lease);
        worker.unreported.add(lease);
        worker.begin_prefill(now_s, lease);
        self.reorder(link);
    }

    /// A worker's blocks came or went.
    pub(super) fn blocks_changed(&mut self, link: Link, change: BlockChange) {
        let Some(worker) = self.workers.get_mut(&link) else {
            return;
        };
        if !worker.reports_blocks {
            worker.reports_blocks = true;
            worker.believed.clear();
            self.blocks.index_mut().clear(worker.number);
        }
        let index = self.blocks.index_mut();
        match change {
            BlockChange::Stored(blocks) => index.store(worker.number, NO_BLOCK, &blocks),
            BlockChange::Removed(blocks) => index.remove(worker.number, &blocks),
            BlockChange::Cleared => index.clear(worker.number),
        }
    }

    /// A worker that does not report its blocks is believed to hold those of the prompts that it was given last.
    pub(super) fn believe(&mut self, link: Link, blocks: &[u64]) {
        let Some(worker) = self.workers.get_mut(&link) else {
            return;
        };
        let fed = worker.reports_blocks || self.blocks.is_fed(&worker.hello.instance_id);
        if fed || worker.hello.description.block_tokens == 0 {
            return;
        }
        let total = worker.kv_tokens_total / u64::from(worker.hello.description.block_tokens);
        let most = if total == 0 {
            BELIEVED_BLOCKS
        } else {
            (total as usize).min(BELIEVED_BLOCKS)
        };
        let (index, believed) = (self.blocks.index_mut(), &mut worker.believed);
        let blocks = &blocks[..blocks.len().min(most)];
        let known = index.leading(worker.number, blocks) as usize;
        let parent = known.checked_sub(1).map_or(NO_BLOCK, |last| blocks[last]);
        let fresh = &blocks[known..];
        believed.extend(fresh.iter().filter(|&&block| !index.holds(worker.number, block)));
        index.store(worker.number, parent, fresh);
        let over = believed.len().saturating_sub(most);
        let oldest: Vec<u64> = believed.drain(..over).collect();
        index.remove(worker.number, &oldest);
    }

    /// A lease ends; returns it, and the worker that has more room now.
    pub(super) fn free(&mut self, now_s: f64, id: LeaseId) -> Option<(Lease, Option<Link>)> {
        let lease = self.leases.remove(&id)?;
        let Some(&link) = self.instances.get(&lease.instance_id) else {
            if let Some(ids) = self.unjoined.get_mut(&lease.instance_id) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.unjoined.remove(&lease.instance_id);
                }
            }
            return Some((lease, None));
        };
        if let Some(worker) = self.workers.get_mut(&link) {
            worker.held.discard(&lease);
            worker.unreported.discard(&lease);
            worker.arriving.discard(&lease);
            self.expected.remove(worker.number, &lease.blocks);
            worker.drop_prefill(now_s, &lease);
            if let Some(pool) = self.pools.get_mut(&worker.hello.pool).filter(|_| lease.stays) {
                pool.staying -= 1;
            }
            if lease.phase == Phase::Aside {
                worker.aside.retain(|&(_, aside)| aside != id);
            } else {
                worker.note_idle(now_s);
            }
        }
        self.reorder(link);
        Some((lease, Some(link)))
    }

    /// So much of a worker is promised now.
    pub(super) fn promise(&mut self, link: Link, promised: Room) {
        if let Some(worker) = self.workers.get_mut(&link) {
            worker.promised = promised;
            self.reorder(link);
        }
    }

    /// Puts a worker where it belongs in its pool's order after any change to it.
    pub(super) fn reorder(&mut self, link: Link) {
        if let Some(worker) = self.workers.get(&link) {
            if let Some(pool) = self.pools.get_mut(&worker.hello.pool) {
                pool.reorder(worker);
            }
        }
    }

    /// Whether some ready worker of that pool may have this ask when there is room.
    pub fn can_ever_run(&self, pool: &Pool, ask: &Ask) -> bool {
        if ask.avoid_instances.is_empty() {
            return !pool.ready.is_empty() && ask.prompt_tokens <= pool.max_prompt_tokens;
        }
        pool.ready
            .iter()
            .filter_map(|link| self.workers.get(link))
            .any(|worker| worker.can_ever_run(ask))
    }
    /// What routers are told.
    pub fn view(&self) -> Vec<PoolView> {
        self.pools.values().map(|pool| self.pool_view(pool)).collect()
    }

    fn pool_view(&self, pool: &Pool) -> PoolView {
        let of = |links: &BTreeSet<Link>| {
            links
                .iter()
                .filter_map(|link| self.workers.get(link))
                .collect::<Vec<_>>()
        };
        let all = of(&pool.workers);
        let described = all.iter().map(|worker| &worker.hello.description);
        let mut description = all
            .first()
            .map(|worker| worker.hello.description.clone())
            .unwrap_or_default();
        description.context_tokens = described.clone().map(|each| each.context_tokens).max().unwrap_or(0);
        description.capabilities = common(&described.map(|each| &each.capabilities).collect::<Vec<_>>());
        PoolView {
            name: pool.name.clone(),
            description,
            ready_workers: pool.ready.len(),
            workers: pool.workers.len(),
            addresses: of(&pool.ready)
                .iter()
                .map(|worker| worker.hello.address.clone())
                .collect(),
        }
    }

    fn touch(&mut self) {
        self.changed = true;
        self.version += 1;
    }
}
/// Makes a lease of that pool one that stays, if there are not too many; true when it is one.
fn may_stay(pools: &mut BTreeMap<Arc<str>, Pool>, pool: &str, lease: &mut Lease) -> bool {
    if let Some(pool) = pools
        .get_mut(pool)
        .filter(|pool| !lease.stays && pool.more_may_stay() > 0)
    {
        lease.stays = true;
        pool.staying += 1;
    }
    lease.stays
}

#[cfg(test)]
impl Fleet {
    /// What holds after every step.
    pub(super) fn check(&self) {
        let mut held = 0;
        for worker in self.workers.values() {
            let sum = |part: &super::leases::Held| {
                let leases = part.ids().map(|id| &self.leases[&id]);
                leases.fold((0, 0, 0), |(choices, prompt, kv), lease| {
                    (
                        choices + u64::from(lease.choices),
                        prompt + u64::from(lease.prompt_tokens),
                        kv + lease.kv_tokens,
                    )
                })
            };
            for part in [&worker.held, &worker.unreported, &worker.arriving] {
                assert_eq!(
                    (part.choices, part.prompt_tokens, part.kv_tokens),
                    sum(part),
                    "sums are of what is in the set"
                );
            }
            assert!(worker.unreported.leases.is_subset(&worker.held.leases));
            assert!(worker.arriving.leases.is_subset(&worker.held.leases));
            assert!(worker.arriving.leases.is_disjoint(&worker.unreported.leases));
            let arriving = |id: &LeaseId| self.leases[id].phase == Phase::Arriving;
            assert_eq!(worker.held.ids().filter(arriving).count(), worker.arriving.len());
            held += worker.held.len() + worker.aside.len();
            let prefilling: Vec<_> = worker
                .held
                .ids()
                .filter(|id| self.leases[id].phase == Phase::Prefill)
                .collect();
            assert!(worker.prefilling.iter().all(|id| prefilling.contains(id)));
            assert_eq!(worker.prefilling.len(), prefilling.len());
            assert!(worker.aside.iter().all(|(_, id)| self.leases[id].phase == Phase::Aside));
            let others = |id: &&LeaseId| self.leases[id].class != Class::Batch;
            for (prompts, ids) in [
                (&worker.prompts, prefilling.clone()),
                (&worker.others, prefilling.iter().filter(others).copied().collect()),
            ] {
                let sum: f64 = ids.iter().map(|id| self.leases[id].prefill_ms).sum();
                let tokens: u64 = ids.iter().map(|id| u64::from(self.leases[id].uncached_tokens)).sum();
                assert_eq!((prompts.given() as usize, prompts.given_tokens()), (ids.len(), tokens));
                assert!(
                    (prompts.given_ms() - sum).abs() < 1e-3 * (1.0 + sum),
                    "{} {sum}",
                    prompts.given_ms()
                );
            }
            let batch = |id: &LeaseId| self.leases[id].class == Class::Batch;
            assert_eq!(worker.held.batch_requests(), worker.held.ids().filter(batch).count());
            let pool = &self.pools[&worker.hello.pool];
            assert!(pool.workers.contains(&worker.link));
            let makes_way = pool.preempt && worker.could_make_way(1);
            for (class, takes) in [
                (Class::Batch, worker.open()),
                (Class::Interactive, worker.open() || makes_way),
            ] {
                let group = pool.at.get(&worker.link);
                let order = group.and_then(|group| Some(pool.orders.get(group)?.of(class)));
                let at = order.and_then(|order| order.at.get(&worker.link)).map(|&(key, _)| key);
                let standing = takes.then(|| worker.standing(class));
                assert_eq!(at, standing, "in the order is who can take something");
            }
            assert_eq!(pool.ready.contains(&worker.link), worker.ready());
            let makes_way =
                (worker.ready() && worker.held.batch() > 0).then(|| (worker.taken_by_others(), worker.link));
            assert_eq!(pool.makes_way.at.get(&worker.link).map(|&(key, _)| key), makes_way);
            assert_eq!(self.instances.get(&worker.hello.instance_id), Some(&worker.link));
            for id in worker.held.ids() {
                assert_eq!(self.leases[&id].instance_id, worker.hello.instance_id);
            }
        }
        let unjoined: usize = self.unjoined.values().map(BTreeSet::len).sum();
        assert_eq!(held + unjoined, self.leases.len(), "each lease is held once");
        self.pools.values().for_each(|pool| self.check_counts(pool));
        let in_pools: usize = self.pools.values().map(|pool| pool.workers.len()).sum();
        assert_eq!(in_pools, self.workers.len());
        assert!(self
            .pools
            .values()
            .all(|pool| !pool.workers.is_empty() && pool.at.len() <= pool.ready.len()));
        assert!(self
            .pools
            .values()
            .all(|pool| pool.makes_way.links().count() == pool.makes_way.len()
                && pool.makes_way.len() <= pool.ready.len()));
    }

    /// What a pool counts is what is there.
    fn check_counts(&self, pool: &Pool) {
        let workers = pool.workers.iter().map(|link| &self.workers[link]);
        let ready = workers.clone().filter(|worker| worker.ready());
        assert_eq!(pool.slots, ready.map(|worker| u64::from(worker.slots)).sum::<u64>());
        let aside = |worker: &Worker| worker.aside.iter().map(|&(_, id)| id).collect::<Vec<_>>();
        let ids = workers.flat_map(|worker| worker.held.ids().chain(aside(worker)));
        let staying = ids.filter(|id| self.leases[id].stays).count() as u64;
        assert_eq!(pool.staying, staying);
    }

    /// Nothing is left of leases.
    pub(super) fn check_empty(&self) {
        assert!(self.leases.is_empty() && self.unjoined.is_empty() && self.expected.is_empty());
    }
}
