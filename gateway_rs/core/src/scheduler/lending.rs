//! When room is lent to routers, and when it is taken back. The books are `credits.rs`'s, and so is the proof.
//!
//! A pool lends while nothing waits for it. The first ask that has to wait takes everything back: from then on the queue
//! alone decides whose turn it is, until it has been empty for a while and there is room again.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    actions::Action,
    core::Core,
    events::{Ask, LeaseId, Link},
    leases::{kv_tokens, Lease, Phase},
    lengths::Root,
    map::Key,
    placement::LOOKAHEAD,
    policy::Disaggregation,
    pool::Pool,
    queue::Urgency,
    worker::Worker,
};
use crate::{
    credits::{Ledger, Outlook, Room, Share},
    index::marks,
};

/// Shares are looked at again at most so often: what came meanwhile is one change.
const INTERVAL_S: f64 = 0.05;

/// A pool whose queue had to be asked lends again after so long at the earliest, so that the two ways do not alternate
/// with every request.
const PAUSE_S: f64 = 0.5;

/// And when so many parts of its room are free again: one of four.
const FREE_PARTS: u64 = 4;

/// KV of a worker that does not say how much it has.
const UNBOUNDED_KV_TOKENS: u64 = 1 << 50;

/// A router that has placed nothing of late still gets a little: its first requests should not have to ask either.
const LEAST_DEMAND_PER_S: f64 = 0.1;

/// What lending remembers.
#[derive(Debug, Default)]
pub(super) struct Lending {
    /// The books.
    pub ledger: Ledger,
    /// Workers whose room has changed since they were last looked at.
    changed: BTreeSet<Link>,
    /// When that was.
    looked_s: f64,
    /// Pools that lend nothing, by when they stopped.
    stopped: BTreeMap<Arc<str>, f64>,
    /// What each worker's holders were last told of it, and when.
    told: BTreeMap<Link, (f64, Outlook)>,
}

impl Lending {
    /// When to look again; None = when something changes.
    pub fn next_s(&self) -> Option<f64> {
        (!self.changed.is_empty()).then_some(self.looked_s + INTERVAL_S)
    }
}

impl Core {
    /// A router has placed a request by itself. A fact, whatever we believed of the room there.
    pub(super) fn placed(&mut self, link: Link, id: LeaseId, worker: Link, ask: &Ask) {
        self.lending.ledger.hears(link);
        let (Some(router_id), Some(held)) = (self.routers_by_link.get(&link), self.fleet.workers.get(&worker)) else {
            // Its worker has just gone; the release will not be known either.
            return;
        };
        if self.fleet.leases.contains_key(&id) {
            self.oddities.lease_collision += 1;
            return;
        }
        let found = self.fleet.consider(self.now_s, worker, ask, false, self.placer());
        let (prefill_ms, hit_tokens) = found.map_or((0.0, 0), |(choice, _)| (choice.prefill_ms, choice.hit_tokens));
        let lease = Lease {
            id,
            router_id: router_id.clone(),
            instance_id: held.hello.instance_id.clone(),
            request_id: ask.request_id.clone(),
            tenant: ask.tenant.clone(),
            choices: ask.choices,
            prompt_tokens: ask.prompt_tokens,
            blocks: marks(&ask.block_hashes, self.fleet.held_blocks(worker, ask)),
            kv_tokens: kv_tokens(ask),
            granted_s: self.now_s,
            first_granted_s: self.now_s,
            class: ask.class,
            phase: Phase::Prefill,
            prefill_ms,
            uncached_tokens: ask.prompt_tokens - hit_tokens,
            urgency: Urgency {
                rank: ask.class.rank(),
                due: Key(self.due_s(ask)),
            },
            predicted_ttft_s: None,
            charged: None,
            root: Root::of(ask),
            output_tokens: 0,
            max_tokens: ask.max_tokens,
            tpot_target_s: self.policy.tpot_target_s(ask),
            preempted: 0,
            stays: false,
            by_credit: Some(link),
            booking: ask.booking,
            prompt_only: false,
        };
        let (router_id, pool) = (router_id.clone(), held.hello.pool.clone());
        let price = self.prices.of(&pool);
        self.budgets.placed(self.now_s, &router_id, ask, price);
        self.budgets.runs(ask.booking, &pool, price);
        self.lending.ledger.placed(link, worker, room_of(&lease));
        self.demanded(link);
        self.hold(lease);
        self.fleet.believe(worker, &ask.block_hashes);
        self.room_changed(worker);
    }

    /// A router knows its shares up to that number.
    pub(super) fn knows_shares(&mut self, link: Link, number: u64) {
        for worker in self.lending.ledger.knows(link, number) {
            self.room_changed(worker);
            self.offer(worker);
        }
    }

    /// A lease has ended that was placed by credit.
    pub(super) fn settled_by_credit(&mut self, lease: &Lease, worker: Link) {
        if let Some(router) = lease.by_credit {
            self.lending.ledger.released(router, worker, room_of(lease));
        }
    }

    /// Counts a request for the share that a router should have.
    pub(super) fn demanded(&mut self, link: Link) {
        let now_s = self.now_s;
        if let Some(router) = self.routers_by_link.get(&link) {
            if let Some(router) = self.routers.get_mut(router) {
                router.demand.add(now_s, 1.0);
            }
        }
    }

    /// A worker's room is another one than before, or may be.
    pub(super) fn room_changed(&mut self, worker: Link) {
        self.fleet.promise(worker, self.lending.ledger.promised(worker));
        if self.policy.lends() {
            self.lending.changed.insert(worker);
        }
    }

    /// All workers of a pool have to be looked at: routers hear otherwise of them.
    pub(super) fn pool_changed(&mut self, pool: &str) {
        let workers = self.fleet.pools.get(pool).map(|pool| pool.workers.clone());
        workers
            .into_iter()
            .flatten()
            .for_each(|worker| self.room_changed(worker));
    }

    /// All workers have to be looked at: a router came or went.
    pub(super) fn routers_changed(&mut self) {
        let workers: Vec<_> = self.fleet.workers.keys().copied().collect();
        workers.into_iter().for_each(|worker| self.room_changed(worker));
    }

    /// Something has to wait in that pool: it is for the queue now.
    pub(super) fn stop_lending(&mut self, pool: &str) {
        let Some(pool) = self.fleet.pools.get(pool) else {
            return;
        };
        let before = self.lending.stopped.insert(pool.name.clone(), self.now_s);
        if before.is_some() {
            return;
        }
        let workers: Vec<_> = pool.workers.iter().copied().collect();
        workers.into_iter().for_each(|worker| self.take_back(worker));
    }

    /// Routers place nothing more on a worker by themselves.
    pub(super) fn take_back(&mut self, worker: Link) {
        let mut shares = Vec::new();
        self.lending.ledger.take_back(worker, &mut shares);
        self.send(shares);
        self.room_changed(worker);
    }

    /// A worker is gone.
    pub(super) fn unlend(&mut self, worker: Link) {
        self.lending.ledger.remove_worker(worker);
        // Those too that hold nothing of it now: they may have been told who it is.
        let routers = self.routers.values().filter_map(|router| router.link);
        let lends = self.policy.lends();
        self.actions
            .extend(routers.filter(|_| lends).map(|link| Action::Unlent { link, worker }));
        self.lending.changed.remove(&worker);
        self.lending.told.remove(&worker);
    }

    /// Looks at the workers whose room has changed, and lends, or corrects what is lent.
    pub(super) fn lend(&mut self) {
        if !self.lending.next_s().is_some_and(|next_s| next_s <= self.now_s) {
            return;
        }
        self.lending.looked_s = self.now_s;
        self.resume_lending();
        let now_s = self.now_s;
        let demand: Vec<_> = (self.routers.values_mut())
            .filter_map(|router| Some((router.link?, router.demand.per_s(now_s) + LEAST_DEMAND_PER_S)))
            .collect();
        for link in std::mem::take(&mut self.lending.changed) {
            let Some(worker) = self.fleet.workers.get(&link) else {
                continue;
            };
            // Prompts for others come from the queue alone: what it gives there is nobody's to promise.
            if self.lending.stopped.contains_key(&worker.hello.pool) || worker.prompts_only() {
                continue;
            }
            if !worker.ready() || worker.reserved_for.is_some() {
                self.take_back(link);
                self.lending.changed.remove(&link);
                continue;
            }
            let mut shares = Vec::new();
            let free = free(worker);
            self.lending.ledger.lend(link, free, &demand, &mut shares);
            self.fleet.promise(link, self.lending.ledger.promised(link));
            let sent: BTreeSet<_> = shares.iter().map(|share| share.router).collect();
            self.send(shares);
            self.tell(link, &sent);
        }
    }

    /// Pools that have been calm for a while lend again.
    fn resume_lending(&mut self) {
        let calm: Vec<_> = (self.lending.stopped.iter())
            .filter(|(pool, since_s)| self.now_s >= *since_s + PAUSE_S && self.is_calm(pool))
            .map(|(pool, _)| pool.clone())
            .collect();
        for name in calm {
            self.lending.stopped.remove(&name);
            if let Some(pool) = self.fleet.pools.get(&name) {
                self.lending.changed.extend(&pool.workers);
            }
        }
        // Otherwise nothing might happen any more that would have us look again.
        let waiting = self
            .lending
            .stopped
            .keys()
            .filter_map(|name| self.fleet.pools.get(name));
        let one_each: Vec<_> = waiting.filter_map(|pool| pool.workers.first().copied()).collect();
        self.lending.changed.extend(one_each);
    }

    fn is_calm(&self, pool: &str) -> bool {
        let Some(pool) = self.fleet.pools.get(pool) else {
            return true;
        };
        let (mut all, mut open) = (0, 0);
        let workers = pool.ready.iter().filter_map(|link| self.fleet.workers.get(link));
        for worker in workers.filter(|worker| !worker.prompts_only()) {
            all += worker.limit;
            open += free(worker).choices;
        }
        let mut waiting = self.queue.in_turn(&pool.name).take(LOOKAHEAD);
        waiting.all(|waiting| self.waits_for_prompts(waiting.place)) && open * FREE_PARTS >= all
    }

    fn send(&mut self, shares: Vec<Share>) {
        for share in shares {
            if let Some(worker) = self.fleet.workers.get(&share.worker) {
                let outlook = Outlook {
                    placed: self.lending.ledger.heard(share.router),
                    ..self.outlook(worker)
                };
                self.actions.push(Action::Lent { share, outlook });
            }
        }
    }

    fn outlook(&self, worker: &Worker) -> Outlook {
        let kinds = &self.fleet.kinds;
        let pool = self.fleet.pools.get(&worker.hello.pool);
        let parts = self.policy.disaggregation != Disaggregation::Off && pool.is_some_and(Pool::has_prefill);
        Outlook {
            pending_prefill_ms: worker.prompts.pending_ms(self.now_s),
            cost: kinds.prompt_cost(worker.kind, worker.pace),
            decoding: worker.decoding(),
            waiting: worker.prompts.waiting(),
            idle_ms: worker.idle_ms(self.now_s),
            ahead_ms: kinds.trusted(worker.kind).then(|| self.ahead_ms(worker)),
            ask_from_tokens: if parts {
                self.policy.disaggregation_min_tokens
            } else {
                0
            },
            placed: 0,
        }
    }

    /// Tells the holders of a worker's shares how it is doing, when that is news. Those in `sent` have just been told.
    fn tell(&mut self, link: Link, sent: &BTreeSet<Link>) {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return;
        };
        let outlook = self.outlook(worker);
        let (told_s, told) = self.lending.told.entry(link).or_default();
        if !is_news(told, self.now_s - *told_s, &outlook) {
            return;
        }
        (*told_s, *told) = (self.now_s, outlook);
        for router in self
            .lending
            .ledger
            .holders(link)
            .filter(|router| !sent.contains(router))
        {
            let placed = self.lending.ledger.heard(router);
            self.actions.push(Action::News {
                link: router,
                worker: link,
                outlook: Outlook { placed, ..outlook },
            });
        }
    }
}

fn room_of(lease: &Lease) -> Room {
    Room {
        choices: u64::from(lease.choices),
        kv_tokens: lease.kv_tokens,
    }
}

/// What is neither held nor promised.
fn free(worker: &Worker) -> Room {
    let capacity = Room {
        choices: worker.limit,
        kv_tokens: match worker.kv_tokens_total {
            0 => UNBOUNDED_KV_TOKENS,
            total => total,
        },
    };
    let held = Room {
        choices: worker.held.choices(),
        kv_tokens: worker.kv_demand_tokens(),
    };
    capacity.less(held).less(worker.promised)
}

/// Whether a router would place otherwise for it, by what it has made of what it was told so long ago: an eighth more or less
/// of the work that waits, or of the factor by which a prompt there delays others.
fn is_news(told: &Outlook, ago_s: f64, now: &Outlook) -> bool {
    let differs = |told: f64, now: f64, grain: f64| (told - now).abs() > grain.max(told.max(now) / 8.0);
    let factor = |of: &Outlook| (1.0 + f64::from(of.decoding)) * (1.0 + f64::from(of.waiting));
    let told_pending_ms = (told.pending_prefill_ms - ago_s * 1e3).max(0.0);
    let grain_ms = now.cost.prefill_ms(128, 0);
    differs(told_pending_ms, now.pending_prefill_ms, grain_ms)
        || differs(factor(told), factor(now), 0.0)
        || told.ahead_ms.is_some() != now.ahead_ms.is_some()
        || differs(told.ahead_ms.unwrap_or(0.0), now.ahead_ms.unwrap_or(0.0), 0.0)
        || differs(told.cost.token_ms, now.cost.token_ms, 0.0)
        || differs(told.cost.pair_ms, now.cost.pair_ms, 0.0)
        || told.ask_from_tokens != now.ask_from_tokens
}
