//! Both sides against each other, over streams that keep their order and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use proptest::prelude::*;
use rand::{rngs::StdRng, Rng, SeedableRng};

use super::*;
use crate::{
    cost::PromptCost,
    index::{Limits, PrefixIndex, NO_BLOCK},
};

const CAPACITY: Room = Room {
    choices: 9,
    kv_tokens: 900,
};

/// What a router says, in order.
enum Said {
    Placed(u64, u64, Room),
    Released(u64),
    Knows(u64),
}

/// As the tests' prompts cost.
const MS_PER_TOKEN: PromptCost = PromptCost {
    token_ms: 1.0,
    pair_ms: 0.0,
};

const POOL: &str = "pool";

/// A prompt that nobody holds.
fn wanted(tokens: u32, room: Room, avoid: &BTreeSet<u64>) -> Wanted<'_> {
    Wanted {
        pool: POOL,
        prompt_tokens: tokens,
        blocks: &[],
        room,
        may_part: false,
        avoid,
    }
}

fn grantor(worker: u64) -> Grantor {
    Grantor {
        pool: Arc::from(POOL),
        number: worker as u32,
        block_tokens: 100,
    }
}

#[derive(Default)]
struct Router {
    holder: Holder,
    /// By lease: what it took.
    running: BTreeMap<u64, Taken>,
    /// Granted by the scheduler: worker and room.
    granted: BTreeMap<u64, (u64, Room)>,
    incoming: VecDeque<(Share, Outlook)>,
    outgoing: VecDeque<Said>,
}

/// A lease as the scheduler knows it.
struct Lease {
    router: u64,
    worker: u64,
    room: Room,
    by_credit: bool,
}

struct World {
    ledger: Ledger,
    leases: BTreeMap<u64, Lease>,
    routers: BTreeMap<u64, Router>,
    workers: Vec<u64>,
    index: PrefixIndex,
    next: u64,
    dice: StdRng,
    placed_by_credit: u64,
}

impl World {
    fn new(seed: u64, routers: u64, workers: u64) -> Self {
        let mut world = Self {
            ledger: Ledger::default(),
            leases: BTreeMap::new(),
            routers: (0..routers).map(|id| (id, Router::default())).collect(),
            workers: (100..100 + workers).collect(),
            index: PrefixIndex::new(Limits::default(), 1),
            next: 1,
            dice: StdRng::seed_from_u64(seed),
            placed_by_credit: 0,
        };
        (0..routers).for_each(|router| world.ledger.join(router));
        world
    }

    fn held(&self, worker: u64) -> Room {
        let here = self.leases.values().filter(|lease| lease.worker == worker);
        here.fold(Room::NONE, |sum, lease| sum.plus(lease.room))
    }

    fn free(&self, worker: u64) -> Room {
        CAPACITY.less(self.held(worker)).less(self.ledger.promised(worker))
    }

    fn any_router(&mut self) -> u64 {
        let ids: Vec<_> = self.routers.keys().copied().collect();
        ids[self.dice.random_range(0..ids.len())]
    }

    fn any_worker(&mut self) -> u64 {
        self.workers[self.dice.random_range(0..self.workers.len())]
    }

    fn any_room(&mut self) -> Room {
        Room {
            choices: self.dice.random_range(1..4),
            kv_tokens: self.dice.random_range(1..300),
        }
    }

    fn step(&mut self) {
        match self.dice.random_range(0..14) {
            0 | 1 => self.place_by_credit(),
            2 | 3 => self.finish(),
            4 => self.grant(),
            5 | 6 => self.lend(),
            7 => {
                let worker = self.any_worker();
                self.send(|ledger, shares| ledger.take_back(worker, shares));
            }
            8..=10 => self.hear_router(),
            11 | 12 => self.hear_scheduler(),
            _ => {
                if self.dice.random_bool(0.2) {
                    self.reconnect();
                }
            }
        }
        self.check();
    }

    fn place_by_credit(&mut self) {
        let (router, room, lease) = (self.any_router(), self.any_room(), self.next);
        self.next += 1;
        let (own, avoid) = (self.routers.get_mut(&router).expect("it is there"), BTreeSet::new());
        let wanted = wanted(10, room, &avoid);
        if let Some(taken) = own.holder.place(0.0, &wanted, &self.index, &mut self.dice) {
            self.placed_by_credit += 1;
            own.outgoing.push_back(Said::Placed(lease, taken.worker, room));
            own.running.insert(lease, taken);
        }
    }

    fn finish(&mut self) {
        let router = self.any_router();
        let own = self.routers.get_mut(&router).expect("it is there");
        if let Some((lease, taken)) = own.running.pop_first() {
            own.holder.give_back(0.0, taken);
            own.outgoing.push_back(Said::Released(lease));
        } else if let Some((lease, _)) = own.granted.pop_first() {
            own.outgoing.push_back(Said::Released(lease));
        }
    }

    fn grant(&mut self) {
        let (router, worker, room) = (self.any_router(), self.any_worker(), self.any_room());
        if room.fits(self.free(worker)) {
            let by_credit = false;
            self.leases.insert(
                self.next,
                Lease {
                    router,
                    worker,
                    room,
                    by_credit,
                },
            );
            let own = self.routers.get_mut(&router).expect("it is there");
            own.granted.insert(self.next, (worker, room));
            self.next += 1;
        }
    }

    fn lend(&mut self) {
        let worker = self.any_worker();
        let demand: Vec<_> = (self.routers.keys())
            .map(|&router| (router, f64::from(self.dice.random_range(0..5_u32))))
            .collect();
        let free = self.free(worker);
        self.send(|ledger, shares| ledger.lend(worker, free, &demand, shares));
    }

    fn send(&mut self, what: impl FnOnce(&mut Ledger, &mut Vec<Share>)) {
        let mut shares = Vec::new();
        what(&mut self.ledger, &mut shares);
        for share in shares {
            let router = self.routers.get_mut(&share.router).expect("it is there");
            router.incoming.push_back((share, Outlook::default()));
        }
    }

    fn hear_router(&mut self) {
        let router = self.any_router();
        match self.routers.get_mut(&router).and_then(|own| own.outgoing.pop_front()) {
            Some(Said::Placed(lease, worker, room)) => {
                self.ledger.placed(router, worker, room);
                let by_credit = true;
                self.leases.insert(
                    lease,
                    Lease {
                        router,
                        worker,
                        room,
                        by_credit,
                    },
                );
            }
            Some(Said::Released(lease)) => {
                let lease = self.leases.remove(&lease).expect("held");
                if lease.by_credit {
                    self.ledger.released(router, lease.worker, lease.room);
                }
            }
            Some(Said::Knows(number)) => drop(self.ledger.knows(router, number)),
            None => {}
        }
    }

    fn hear_scheduler(&mut self) {
        let router = self.any_router();
        let own = self.routers.get_mut(&router).expect("it is there");
        if let Some((share, outlook)) = own.incoming.pop_front() {
            own.holder.introduce(share.worker, grantor(share.worker));
            own.holder.receive(0.0, share.number, share.worker, share.room, outlook);
            own.outgoing.push_back(Said::Knows(own.holder.known()));
        }
    }

    /// The stream breaks and comes again: all that was under way is lost, what runs is announced.
    fn reconnect(&mut self) {
        let router = self.any_router();
        let own = self.routers.get_mut(&router).expect("it is there");
        own.incoming.clear();
        own.outgoing.clear();
        own.holder.reset();
        let known: Vec<_> = (self.leases.iter())
            .filter(|(_, lease)| lease.router == router)
            .map(|(&id, _)| id)
            .collect();
        for id in known {
            if !own.running.contains_key(&id) && !own.granted.contains_key(&id) {
                self.leases.remove(&id);
            }
        }
        self.ledger.leave(router);
        self.ledger.join(router);
        for (&id, taken) in &own.running {
            self.leases.insert(
                id,
                Lease {
                    router,
                    worker: taken.worker,
                    room: taken.room,
                    by_credit: false,
                },
            );
        }
    }

    /// What really runs on each worker is within what it can hold.
    fn check(&self) {
        for &worker in &self.workers {
            let mut sum = Room::NONE;
            for own in self.routers.values() {
                let by_credit = own.running.values().map(|taken| (taken.worker, taken.room));
                let here = by_credit
                    .chain(own.granted.values().copied())
                    .filter(|(at, _)| *at == worker);
                sum = here.fold(sum, |sum, (_, room)| sum.plus(room));
            }
            assert!(sum.fits(CAPACITY), "worker {worker} runs {sum:?}");
            let counted = self.held(worker).plus(self.ledger.promised(worker));
            assert!(counted.fits(CAPACITY), "worker {worker} is promised {counted:?}");
        }
    }

    fn settle(&mut self) {
        for _ in 0..10_000 {
            if (self.routers.values()).all(|own| own.incoming.is_empty() && own.outgoing.is_empty()) {
                return;
            }
            self.hear_scheduler();
            self.hear_router();
        }
        unreachable!("they have always something to say");
    }
}

proptest! {
    #[test]
    fn no_schedule_of_shares_grants_and_releases_overcommits(
        seed in any::<u64>(), routers in 1_u64..5, workers in 1_u64..4, steps in 1_usize..400,
    ) {
        let mut world = World::new(seed, routers, workers);
        (0..steps).for_each(|_| world.step());
        // At rest nothing is promised, and all of it can be granted again.
        let workers = world.workers.clone();
        for &worker in &workers {
            world.send(|ledger, shares| ledger.take_back(worker, shares));
        }
        world.settle();
        while world.routers.values().any(|own| !own.running.is_empty() || !own.granted.is_empty()) {
            world.finish();
        }
        world.settle();
        for worker in workers {
            prop_assert_eq!(world.free(worker), CAPACITY);
            prop_assert!(!world.ledger.lends(worker));
        }
    }
}

#[test]
fn shares_follow_demand() {
    let mut world = World::new(1, 2, 1);
    let worker = world.workers[0];
    let lend = |world: &mut World, first: f64, second: f64| {
        for _ in 0..3 {
            let free = world.free(worker);
            world.send(|ledger, shares| ledger.lend(worker, free, &[(0, first), (1, second)], shares));
            world.settle();
        }
        [0, 1].map(|router| world.ledger.of(router, worker).1.choices)
    };
    let [first, second] = lend(&mut world, 3.0, 1.0);
    assert!(first > second && second > 0, "{first}, {second}");
    let [first, second] = lend(&mut world, 0.0, 1.0);
    assert_eq!(first, 0);
    assert!(second >= 6, "{second}");
}

#[test]
fn a_share_that_is_taken_back_counts_until_the_router_knows() {
    let mut world = World::new(1, 1, 1);
    let worker = world.workers[0];
    let free = world.free(worker);
    world.send(|ledger, shares| ledger.lend(worker, free, &[(0, 1.0)], shares));
    world.settle();
    let lent = world.ledger.promised(worker);
    assert!(lent.choices >= 7);
    world.send(|ledger, shares| ledger.take_back(worker, shares));
    assert_eq!(world.ledger.promised(worker), lent);
    world.settle();
    assert_eq!(world.ledger.promised(worker), Room::NONE);
}

#[test]
fn most_requests_find_room_without_asking() {
    let mut world = World::new(7, 3, 3);
    (0..2000).for_each(|_| world.step());
    assert!(world.placed_by_credit > 50, "{}", world.placed_by_credit);
}

/// A router with much room on these workers, of all of which the same is believed.
fn holder_of(workers: std::ops::Range<u64>, outlook: Outlook) -> Holder {
    let mut holder = Holder::default();
    for worker in workers {
        let limit = Room {
            choices: 1000,
            kv_tokens: 1000,
        };
        holder.introduce(worker, grantor(worker));
        holder.receive(0.0, worker + 1, worker, limit, outlook);
    }
    holder
}

const ONE: Room = Room {
    choices: 1,
    kv_tokens: 1,
};

#[test]
fn the_holder_of_a_prompt_is_preferred_while_it_does_not_pay_to_go_elsewhere() {
    let outlook = Outlook {
        cost: MS_PER_TOKEN,
        ..Outlook::default()
    };
    let (mut holder, mut dice) = (holder_of(0..100, outlook), StdRng::seed_from_u64(1));
    let mut index = PrefixIndex::new(Limits::default(), 1);
    let (blocks, avoid): (Vec<u64>, _) = ((1..=32).collect(), BTreeSet::new());
    index.store(42, NO_BLOCK, &blocks[..30]);
    let mut place = |holder: &mut Holder| {
        let wanted = Wanted {
            blocks: &blocks,
            ..wanted(3200, ONE, &avoid)
        };
        holder.place(0.0, &wanted, &index, &mut dice).expect("room")
    };
    // Whatever is drawn, the holder is looked at; and who has given back what it took is as idle as before.
    for _ in 0..50 {
        let taken = place(&mut holder);
        assert_eq!((taken.worker, taken.why.hit_tokens, taken.why.waiting), (42, 3000, 0));
        holder.give_back(0.0, taken);
    }
    // One prompt after the other, none of which ends: in the end another worker does better, even for the price of a copy.
    let busy: Vec<_> = (0..300).map(|_| place(&mut holder)).collect();
    assert_eq!((busy[0].worker, busy[1].why.hit_tokens), (42, 3199));
    let stays = busy.iter().take_while(|taken| taken.worker == 42).count();
    assert!((20..250).contains(&stays), "{stays}");
}

#[test]
fn who_has_been_idle_for_as_long_as_a_copy_takes_may_make_one() {
    let idle = |idle_ms| Outlook {
        cost: MS_PER_TOKEN,
        idle_ms,
        ..Outlook::default()
    };
    let (mut index, avoid) = (PrefixIndex::new(Limits::default(), 1), BTreeSet::new());
    let blocks: Vec<u64> = (1..=32).collect();
    // Worker 1 holds most of the prompt, and has much to do.
    index.store(1, NO_BLOCK, &blocks[..30]);
    let (mut holder, mut dice) = (holder_of(1..3, idle(None)), StdRng::seed_from_u64(1));
    let busy = Outlook {
        decoding: 8,
        waiting: 2,
        ..idle(None)
    };
    holder.hear(0.0, 1, busy);
    let mut place = |holder: &mut Holder, now_s: f64| {
        let wanted = Wanted {
            blocks: &blocks,
            ..wanted(3200, ONE, &avoid)
        };
        let taken = holder.place(now_s, &wanted, &index, &mut dice).expect("room");
        let worker = taken.worker;
        holder.give_back(now_s, taken);
        worker
    };
    // 3,000 tokens computed a second time take 3 s.
    holder.hear(0.0, 2, idle(Some(1000.0)));
    assert_eq!(place(&mut holder, 0.0), 1);
    assert_eq!(place(&mut holder, 0.5), 1);
    assert_eq!(place(&mut holder, 2.5), 2);
    // It has just had that to do.
    assert_eq!(place(&mut holder, 3.0), 1);
    assert_eq!(place(&mut holder, 6.0), 2);
    holder.hear(6.0, 2, idle(None));
    assert_eq!(place(&mut holder, 20.0), 1, "somebody else's work, of unknown end");
}

#[test]
fn what_would_wait_behind_others_is_asked_for() {
    let mut outlook = Outlook {
        cost: MS_PER_TOKEN,
        ahead_ms: Some(100.0),
        ..Outlook::default()
    };
    let (mut holder, mut dice) = (holder_of(1..2, outlook), StdRng::seed_from_u64(1));
    let (index, avoid) = (PrefixIndex::new(Limits::default(), 1), BTreeSet::new());
    let mut place = |holder: &mut Holder, now_s: f64| {
        let taken = holder.place(now_s, &wanted(80, ONE, &avoid), &index, &mut dice);
        taken.is_some()
    };
    // Its own placements count: the third would begin after 160 ms.
    assert_eq!([(); 3].map(|()| place(&mut holder, 0.0)), [true, true, false]);
    (outlook.placed, outlook.waiting, outlook.pending_prefill_ms) = (2, 1, 90.0);
    holder.hear(0.0, 1, outlook);
    assert!(place(&mut holder, 0.0));
    // It computes meanwhile.
    assert!(!place(&mut holder, 0.05));
    assert!(place(&mut holder, 0.08));
    // Where nobody can say how long anything takes, there is no limit.
    outlook.ahead_ms = None;
    outlook.pending_prefill_ms = 1e6;
    holder.hear(0.1, 1, outlook);
    assert!(place(&mut holder, 0.1));
}

#[test]
fn what_the_scheduler_has_not_heard_of_counts_beside_what_it_says() {
    let mut outlook = Outlook {
        cost: MS_PER_TOKEN,
        ..Outlook::default()
    };
    let (mut holder, mut dice) = (holder_of(1..2, outlook), StdRng::seed_from_u64(1));
    let (index, avoid) = (PrefixIndex::new(Limits::default(), 1), BTreeSet::new());
    let mut place = |holder: &mut Holder| {
        let taken = holder.place(0.0, &wanted(80, ONE, &avoid), &index, &mut dice);
        taken.expect("room")
    };
    let seen = |taken: &Taken| (taken.why.waiting, taken.why.decoding, taken.why.pending_prefill_ms);
    let (mut first, _second) = (place(&mut holder), place(&mut holder));
    // It was said before the scheduler heard of the second; others have placed one there too.
    (outlook.placed, outlook.waiting, outlook.pending_prefill_ms) = (1, 2, 100.0);
    holder.hear(0.0, 1, outlook);
    assert_eq!(seen(&place(&mut holder)), (3, 0, 180.0));
    // Of what happens here nobody need tell.
    holder.begun(&mut first);
    assert_eq!(seen(&place(&mut holder)).1, 1);
    holder.give_back(0.0, first);
    // It has heard of all four.
    outlook.placed = 4;
    holder.hear(0.0, 1, outlook);
    assert_eq!(seen(&place(&mut holder)), (2, 0, 100.0));
}
