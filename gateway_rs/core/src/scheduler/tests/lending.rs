//! The core that lends, against routers that place by themselves, over streams that keep their order and nothing else.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use rand::{rngs::StdRng, Rng, SeedableRng};

use super::*;
use crate::{
    credits::{Grantor, Holder, Room, Taken, Wanted},
    scheduler::leases::kv_tokens,
};

const SLOTS: u64 = 6;

#[derive(Default)]
struct Router {
    link: Link,
    holder: Holder,
    /// What it runs: by lease, where and how many choices, and what it took of a share.
    running: BTreeMap<LeaseId, (Link, u64, Option<Taken>)>,
    /// Asks without an answer: choices.
    asked: BTreeMap<u64, u64>,
    incoming: VecDeque<Action>,
    outgoing: VecDeque<Event>,
}

struct World {
    core: Core,
    now_s: f64,
    workers: Vec<Link>,
    routers: Vec<Router>,
    dice: StdRng,
    next: u64,
    by_credit: u64,
}

impl World {
    fn new(seed: u64, routers: usize, workers: u64) -> Self {
        let policy = Policy {
            queue_factor: 1.0,
            credits: true,
            ..Policy::default()
        };
        let mut world = Self {
            core: Core::new(policy, seed, 0.0, 1),
            now_s: 0.0,
            workers: (1000..1000 + workers).collect(),
            routers: Vec::new(),
            dice: StdRng::seed_from_u64(seed),
            next: 1,
            by_credit: 0,
        };
        for link in world.workers.clone() {
            let hello = WorkerHello {
                worker_id: format!("w{link}").into(),
                instance_id: format!("i{link}").into(),
                pool: "pool".into(),
                address: format!("host:{link}").into(),
                description: Description {
                    slots: SLOTS as u32,
                    ..Description::default()
                },
                ..WorkerHello::default()
            };
            let hello = Box::new(hello);
            world.step(Event::WorkerJoined { link, hello });
        }
        world.report();
        for index in 0..routers {
            world.routers.push(Router {
                link: index as Link + 1,
                ..Router::default()
            });
            world.step(Event::RouterJoined {
                bookings: Vec::new(),
                link: index as Link + 1,
                router_id: format!("r{index}").into(),
                running: Vec::new(),
            });
        }
        world
    }

    fn report(&mut self) {
        for link in self.workers.clone() {
            let load = Load {
                state: WorkerState::Ready,
                ..Load::default()
            };
            let load = Box::new(load);
            self.step(Event::WorkerReported { link, load });
        }
    }

    fn step(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.core.step(self.now_s, event, &mut actions);
        for action in actions {
            let link = match &action {
                Action::Granted(grant) => grant.link,
                Action::Refused(refusal) => panic!("refused: {}", refusal.message),
                Action::Lent { share, .. } => share.router,
                Action::News { link, .. } | Action::Unlent { link, .. } => *link,
                _ => continue,
            };
            if let Some(router) = self.routers.iter_mut().find(|router| router.link == link) {
                router.incoming.push_back(action);
            }
        }
        self.core.check();
    }

    fn pass_time(&mut self, seconds: f64) {
        let until_s = self.now_s + seconds;
        while self.now_s < until_s {
            let due_s = self.core.next_wakeup().unwrap_or(f64::INFINITY).max(self.now_s);
            let beat_s = (self.now_s / 0.25).floor().mul_add(0.25, 0.25);
            self.now_s = due_s.min(beat_s).min(until_s);
            if self.now_s == beat_s {
                self.report();
            }
            self.step(Event::Tick);
        }
    }

    fn act(&mut self) {
        let which = self.dice.random_range(0..self.routers.len());
        match self.dice.random_range(0..10) {
            0..=2 => {
                let choices = self.dice.random_range(1..3);
                self.arrive(which, choices);
            }
            3 | 4 => self.finish(which),
            5 | 6 => self.hear_router(which),
            7 | 8 => self.hear_scheduler(which),
            _ => {
                let seconds = self.dice.random_range(0.0..0.2);
                self.pass_time(seconds);
            }
        }
        self.check();
    }

    fn arrive(&mut self, which: usize, choices: u32) {
        let ask = Box::new(Ask {
            number: self.next,
            pools: vec!["pool".into()],
            prompt_tokens: 10,
            choices,
            ..Ask::default()
        });
        self.next += 1;
        let (choices, router) = (u64::from(ask.choices), &mut self.routers[which]);
        let wanted = Wanted {
            pool: "pool",
            prompt_tokens: 10,
            blocks: &[],
            room: Room {
                choices,
                kv_tokens: kv_tokens(&ask),
            },
            may_part: false,
            avoid: &BTreeSet::new(),
        };
        let index = self.core.fleet().blocks().index();
        let taken = router.holder.place(self.now_s, &wanted, index, &mut self.dice);
        let Some(taken) = taken else {
            router.asked.insert(ask.number, choices);
            router.outgoing.push_back(Event::Asked { link: router.link, ask });
            return;
        };
        self.by_credit += 1;
        let lease = 1 << 63 | ask.number;
        router.outgoing.push_back(Event::Placed {
            link: router.link,
            lease,
            worker: taken.worker,
            ask,
        });
        router.running.insert(lease, (taken.worker, choices, Some(taken)));
    }

    /// Ends the oldest request of a router.
    fn finish(&mut self, which: usize) {
        let first = self.routers[which].running.keys().next().copied();
        self.end(which, first);
    }

    /// Ends one of them, whichever.
    fn finish_any(&mut self, which: usize) {
        let count = self.routers[which].running.len();
        let drawn = self.dice.random_range(0..count.max(1));
        let lease = self.routers[which].running.keys().nth(drawn).copied();
        self.end(which, lease);
    }

    fn end(&mut self, which: usize, lease: Option<LeaseId>) {
        let router = &mut self.routers[which];
        let Some((lease, (_, _, taken))) = lease.and_then(|lease| router.running.remove_entry(&lease)) else {
            return;
        };
        if let Some(taken) = taken {
            router.holder.give_back(self.now_s, taken);
        }
        router.outgoing.push_back(Event::Released {
            link: router.link,
            lease,
            books: Books::default(),
        });
    }

    fn hear_router(&mut self, which: usize) {
        if let Some(event) = self.routers[which].outgoing.pop_front() {
            self.step(event);
        }
    }

    fn hear_scheduler(&mut self, which: usize) {
        let router = &mut self.routers[which];
        match router.incoming.pop_front() {
            Some(Action::Granted(grant)) => {
                let choices = router.asked.remove(&grant.ask).unwrap();
                router.running.insert(grant.lease, (grant.worker, choices, None));
            }
            Some(Action::Lent { share, outlook }) => {
                let grantor = Grantor {
                    pool: "pool".into(),
                    number: share.worker as u32,
                    block_tokens: 0,
                };
                router.holder.introduce(share.worker, grantor);
                router
                    .holder
                    .receive(self.now_s, share.number, share.worker, share.room, outlook);
                let number = router.holder.known();
                router.outgoing.push_back(Event::KnowsShares {
                    link: router.link,
                    number,
                });
            }
            Some(Action::News { worker, outlook, .. }) => router.holder.hear(self.now_s, worker, outlook),
            _ => {}
        }
    }

    /// What really runs, and what has been granted and is on its way, is within each worker's limit.
    fn check(&self) {
        for &worker in &self.workers {
            let mut choices = 0;
            for router in &self.routers {
                let here = router.running.values().filter(|(at, _, _)| *at == worker);
                choices += here.map(|(_, choices, _)| choices).sum::<u64>();
                for action in &router.incoming {
                    if let Action::Granted(grant) = action {
                        choices += if grant.worker == worker {
                            router.asked[&grant.ask]
                        } else {
                            0
                        };
                    }
                }
            }
            assert!(choices <= SLOTS, "worker {worker} runs {choices}");
        }
    }

    fn talk(&mut self) {
        for _ in 0..20 {
            for which in 0..self.routers.len() {
                self.hear_router(which);
                self.hear_scheduler(which);
            }
        }
    }
}

proptest! {
    #[test]
    fn lending_never_overcommits_and_starves_nobody(
        seed in any::<u64>(), routers in 1_usize..4, workers in 1_u64..4, steps in 1_usize..300,
    ) {
        let mut world = World::new(seed, routers, workers);
        (0..steps).for_each(|_| world.act());
        // Nothing new comes: in the end everybody has been served, and nothing is left.
        for _ in 0..2000 {
            world.talk();
            (0..routers).for_each(|which| world.finish(which));
            world.pass_time(0.05);
            world.check();
            let done = |router: &Router| router.asked.is_empty() && router.running.is_empty() && router.outgoing.is_empty();
            if world.routers.iter().all(done) {
                break;
            }
        }
        for router in &world.routers {
            prop_assert!(router.asked.is_empty(), "somebody waits for ever");
        }
        prop_assert!(world.core.fleet().leases.is_empty());
        // And routers place by themselves again.
        world.pass_time(2.0);
        world.talk();
        let before = world.by_credit;
        (0..routers).for_each(|which| world.arrive(which, 1));
        prop_assert!(world.by_credit > before);
    }
}

proptest! {
    /// Routers that could always place something small do not keep anybody out who needs more at once, and has to ask.
    #[test]
    fn who_has_to_ask_is_served_however_much_is_placed(
        seed in any::<u64>(), routers in 1_usize..4, workers in 1_u64..4, choices in 1..=SLOTS as u32,
    ) {
        let mut world = World::new(seed, routers, workers);
        let mut first = None;
        for round in 0..3000 {
            let which = world.dice.random_range(0..routers);
            // As much as there is room for, and a little that waits.
            if world.routers[which].asked.len() < 3 {
                world.arrive(which, 1);
            }
            if round == 100 {
                let number = world.next;
                world.arrive(0, choices);
                first = world.routers[0].asked.contains_key(&number).then_some(number);
            }
            let seconds = world.dice.random_range(0.0..0.04);
            world.pass_time(seconds);
            world.talk();
            let which = world.dice.random_range(0..routers);
            world.finish_any(which);
            world.check();
            if round > 100 && !first.is_some_and(|number| world.routers[0].asked.contains_key(&number)) {
                return Ok(());
            }
        }
        prop_assert!(false, "one of {choices} choices still waits, {} s later; {} placed by credit", world.now_s, world.by_credit);
    }
}

#[test]
fn while_nothing_waits_routers_need_not_ask() {
    let mut world = World::new(3, 2, 4);
    world.pass_time(0.2);
    for _ in 0..200 {
        world.talk();
        world.arrive(0, 1);
        world.arrive(1, 1);
        world.talk();
        world.finish(0);
        world.finish(1);
        world.pass_time(0.01);
    }
    assert!(world.by_credit >= 380, "{} of 400", world.by_credit);
}

#[test]
fn routers_hear_of_what_others_place() {
    let mut world = World::new(1, 2, 1);
    world.pass_time(0.2);
    world.talk();
    world.arrive(0, 1);
    world.arrive(1, 1);
    world.talk();
    world.finish(1);
    world.talk();
    world.pass_time(0.06);
    world.talk();
    world.arrive(1, 1);
    let why = world.routers[1]
        .running
        .values()
        .find_map(|(_, _, taken)| Some(taken.as_ref()?.why));
    let why = why.expect("placed without asking");
    assert_eq!((why.waiting, why.pending_prefill_ms > 0.0), (1, true));
}
