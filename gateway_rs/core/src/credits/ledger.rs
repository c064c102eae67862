//! The scheduler's side: what each router may have running on each worker by its own decision, and what it has.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Room;
use crate::scheduler::events::Link;

/// A limit for one router on one worker, to be sent to it. Replaces the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whose.
    pub router: Link,
    /// Counts up by one for each share that is sent to that router, from 1.
    pub number: u64,
    /// Where.
    pub worker: Link,
    /// What it may have running there by its own decision.
    pub room: Room,
}

/// A worker keeps so much of its spare room (one part of so many) for requests that are asked for: of routers that are new,
/// or have used up their share.
const RESERVE: u64 = 8;

/// A share is changed when it is off by more than one part of so many: not for every request that ends somewhere.
const HYSTERESIS: u64 = 4;

/// All shares.
#[derive(Debug, Default)]
pub struct Ledger {
    routers: BTreeMap<Link, Sent>,
    workers: BTreeMap<Link, Lent>,
}

/// What was sent to a router.
#[derive(Debug, Default)]
struct Sent {
    last: u64,
    /// What it has not yet said that it knows: numbers and workers, in order.
    unknown: VecDeque<(u64, Link)>,
    /// Requests that it has reported to have placed.
    placed: u64,
}

/// What is lent of one worker.
#[derive(Debug, Default)]
struct Lent {
    books: BTreeMap<Link, Books>,
    /// Lent and not used, as far as is known: kept, because placement asks for it all the time.
    promised: Room,
}

/// One router on one worker.
#[derive(Debug, Default)]
struct Books {
    /// The limits that may be in force there, in the order sent; the first is the last one that it is known to know.
    limits: VecDeque<(u64, Room)>,
    /// What it has reported to be running there.
    used: Room,
}

impl Books {
    fn latest(&self) -> Room {
        self.limits.back().map_or(Room::NONE, |&(_, room)| room)
    }

    fn ceiling(&self) -> Room {
        self.limits.iter().fold(Room::NONE, |most, &(_, room)| most.most(room))
    }

    fn promised(&self) -> Room {
        self.ceiling().less(self.used)
    }
}

impl Lent {
    fn count(&mut self) {
        self.books
            .retain(|_, books| books.ceiling() != Room::NONE || books.limits.len() > 1 || books.used != Room::NONE);
        let promised = self.books.values().map(Books::promised);
        self.promised = promised.fold(Room::NONE, Room::plus);
    }
}

impl Ledger {
    /// A router's stream began.
    pub fn join(&mut self, router: Link) {
        self.routers.entry(router).or_default();
    }

    /// A router's stream is over, and whoever used it places nothing any more. What it has running is the caller's to count.
    pub fn leave(&mut self, router: Link) {
        self.routers.remove(&router);
        for lent in self.workers.values_mut() {
            if lent.books.remove(&router).is_some() {
                lent.count();
            }
        }
    }

    /// A worker is gone, and all that was lent of it.
    pub fn remove_worker(&mut self, worker: Link) {
        self.workers.remove(&worker);
    }

    /// The routers that may place something on a worker.
    pub fn holders(&self, worker: Link) -> impl Iterator<Item = Link> + '_ {
        let books = self.workers.get(&worker).into_iter().flat_map(|lent| &lent.books);
        books
            .filter(|(_, books)| books.latest() != Room::NONE)
            .map(|(&router, _)| router)
    }

    /// Whether a router may place anything by itself, for all we know.
    pub fn trusts(&self, router: Link) -> bool {
        let books = self.workers.values().filter_map(|lent| lent.books.get(&router));
        books.into_iter().any(|books| books.ceiling() != Room::NONE)
    }

    /// Room of a worker that is lent and not known to be used: nobody else can have it.
    pub fn promised(&self, worker: Link) -> Room {
        self.workers.get(&worker).map_or(Room::NONE, |lent| lent.promised)
    }

    /// Whether anything of a worker is lent, or may still be in force somewhere.
    pub fn lends(&self, worker: Link) -> bool {
        self.workers
            .get(&worker)
            .is_some_and(|lent| lent.books.values().any(|books| books.ceiling() != Room::NONE))
    }

    /// A router reports that it has placed a request, whatever becomes of it.
    pub fn hears(&mut self, router: Link) {
        if let Some(sent) = self.routers.get_mut(&router) {
            sent.placed += 1;
        }
    }

    /// How many those are.
    pub fn heard(&self, router: Link) -> u64 {
        self.routers.get(&router).map_or(0, |sent| sent.placed)
    }

    /// A request that a router has placed runs.
    pub fn placed(&mut self, router: Link, worker: Link, room: Room) {
        let lent = self.workers.entry(worker).or_default();
        let books = lent.books.entry(router).or_default();
        books.used = books.used.plus(room);
        lent.count();
    }

    /// One of those has ended.
    pub fn released(&mut self, router: Link, worker: Link, room: Room) {
        let Some(lent) = self.workers.get_mut(&worker) else {
            return;
        };
        if let Some(books) = lent.books.get_mut(&router) {
            books.used = books.used.less(room);
        }
        lent.count();
    }

    /// A router knows all shares up to that number, and has reported all that it placed before.
    /// Returns the workers whose room is another one for it.
    pub fn knows(&mut self, router: Link, number: u64) -> BTreeSet<Link> {
        let mut changed = BTreeSet::new();
        let Some(sent) = self.routers.get_mut(&router) else {
            return changed;
        };
        while let Some(&(next, worker)) = sent.unknown.front().filter(|(next, _)| *next <= number) {
            sent.unknown.pop_front();
            let Some(lent) = self.workers.get_mut(&worker) else {
                continue;
            };
            if let Some(books) = lent.books.get_mut(&router) {
                while books.limits.front().is_some_and(|&(before, _)| before < next) {
                    books.limits.pop_front();
                }
            }
            lent.count();
            changed.insert(worker);
        }
        changed
    }

    /// Changes what a router may have running on a worker; the share to be sent, if it is another one than before.
    fn limit(&mut self, router: Link, worker: Link, room: Room) -> Option<Share> {
        let sent = self.routers.get_mut(&router)?;
        let lent = self.workers.entry(worker).or_default();
        let books = lent.books.entry(router).or_default();
        if books.latest() == room {
            lent.count();
            return None;
        }
        sent.last += 1;
        sent.unknown.push_back((sent.last, worker));
        if books.limits.is_empty() {
            // Before the first share nothing is allowed; for all we know that is still so.
            books.limits.push_back((0, Room::NONE));
        }
        books.limits.push_back((sent.last, room));
        lent.count();
        Some(Share {
            router,
            number: sent.last,
            worker,
            room,
        })
    }

    /// Takes back what is lent of a worker: routers place nothing more there by themselves.
    pub fn take_back(&mut self, worker: Link, shares: &mut Vec<Share>) {
        let Some(lent) = self.workers.get(&worker) else {
            return;
        };
        let holders: Vec<_> = lent.books.keys().copied().collect();
        for router in holders {
            shares.extend(self.limit(router, worker, Room::NONE));
        }
    }

    /// Lends a worker's spare room to routers by weight. `free` is what is neither held by any lease nor promised.
    pub fn lend(&mut self, worker: Link, free: Room, demand: &[(Link, f64)], shares: &mut Vec<Share>) {
        let spare = free.plus(self.promised(worker));
        let reserve = Room {
            choices: spare.choices.div_ceil(RESERVE),
            kv_tokens: spare.kv_tokens.div_ceil(RESERVE),
        };
        let spare = spare.less(reserve);
        let total: f64 = demand.iter().map(|(_, weight)| weight).sum();
        if total <= 0.0 {
            return;
        }
        let mut left = spare.choices;
        let mut free = free.less(reserve);
        // Whoever stands first gets what rounding leaves: at each worker another one.
        let turn = worker as usize % demand.len();
        for &(router, weight) in demand[turn..].iter().chain(&demand[..turn]) {
            let part = weight / total;
            let choices = ((spare.choices as f64 * part).ceil() as u64).min(left);
            left -= choices;
            let (used, latest, promised) = self.of(router, worker);
            let wanted = used.plus(Room {
                choices,
                kv_tokens: (spare.kv_tokens as f64 * part) as u64,
            });
            if close(latest, wanted) {
                continue;
            }
            // What it gets more than may be in force there already has to be free now.
            let target = wanted.least(latest.most(used.plus(promised)).plus(free));
            if target.choices == 0 && latest.choices == 0 {
                continue;
            }
            shares.extend(self.limit(router, worker, target));
            let after = self.of(router, worker).2;
            free = free.less(after.less(promised));
        }
    }

    /// Used, the latest limit and what is promised, of one router on one worker.
    pub(super) fn of(&self, router: Link, worker: Link) -> (Room, Room, Room) {
        let books = self.workers.get(&worker).and_then(|lent| lent.books.get(&router));
        books.map_or((Room::NONE, Room::NONE, Room::NONE), |books| {
            (books.used, books.latest(), books.promised())
        })
    }
}

/// Whether a share is near enough to what it should be.
fn close(now: Room, wanted: Room) -> bool {
    let near = |now: u64, wanted: u64| {
        now.abs_diff(wanted).saturating_mul(HYSTERESIS) <= now.max(wanted) && (now == 0) == (wanted == 0)
    };
    near(now.choices, wanted.choices) && near(now.kv_tokens, wanted.kv_tokens)
}
