//! Whose turn it is: the asks that wait, for each pool in the order in which they will be served.
//!
//! The order: class first (interactive, standard, batch), then who is due first. An ask that has waited [`AGING_S`] moves
//! one class up and is due at once there: the limit on how long a low class can be passed over.
//!
//! An ask that may run in several pools stands in line in each of them and leaves all lines at once. Adding, withdrawing
//! and taking cost O(pools of the ask, log of the line). How many may wait is the core's rule, and so is what fits where.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    events::{Ask, Link},
    map::{Key, Map},
};

/// Batch work is interactive after a minute: long enough to matter under load, short enough to promise.
pub const AGING_S: f64 = 30.0;

const RANKS: usize = 3;

/// The number of an ask in the queue, in order of arrival.
pub type Place = u64;

/// Lower is served first: class, when it is due, arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    rank: usize,
    due: Key,
    place: Place,
}

/// An ask in the queue.
#[derive(Debug)]
pub struct Waiting {
    /// Its number here.
    pub place: Place,
    /// Its router's stream.
    pub link: Link,
    /// What is asked.
    pub ask: Box<Ask>,
    /// Since when it waits.
    pub arrived_s: f64,
    /// Asks from behind that were served while this one was first in line and did not fit.
    pub passed: u32,
    /// The worker that keeps its room for it.
    pub reserved: Option<Link>,
    turn: Turn,
}

/// The asks of one pool.
#[derive(Debug, Default)]
struct Line {
    order: BTreeMap<Turn, Place>,
    /// How many of each class.
    depth: [usize; RANKS],
    /// Those that refuse some workers; a worker's loss may leave them without any.
    picky: BTreeSet<Place>,
}

/// All asks that wait.
#[derive(Debug, Default)]
pub struct Queue {
    waiting: BTreeMap<Place, Waiting>,
    by_ask: Map<(Link, u64), Place>,
    by_link: Map<Link, BTreeSet<Place>>,
    lines: Map<Arc<str>, Line>,
    deadlines: BTreeSet<(Key, Place)>,
    /// When each moves up a class.
    aging: BTreeSet<(Key, Place)>,
    last: Place,
}

impl Queue {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Asks that wait, for each class as it was asked for.
    pub fn depth_by_class(&self) -> [usize; RANKS] {
        let mut depths = [0; RANKS];
        for waiting in self.waiting.values() {
            depths[waiting.ask.class.rank()] += 1;
        }
        depths
    }

    /// Puts an ask in line.
    pub fn add(&mut self, now_s: f64, link: Link, ask: Box<Ask>) -> Place {
        self.last += 1;
        let place = self.last;
        let rank = ask.class.rank();
        let turn = Turn {
            rank,
            due: Key(now_s),
            place,
        };
        self.by_ask.insert((link, ask.number), place);
        self.by_link.entry(link).or_default().insert(place);
        for pool in &ask.pools {
            let line = self.lines.entry(pool.clone()).or_default();
            line.order.insert(turn, place);
            line.depth[rank] += 1;
            if !ask.avoid_instances.is_empty() {
                line.picky.insert(place);
            }
        }
        if let Some(deadline_s) = ask.deadline_s {
            self.deadlines.insert((Key(deadline_s), place));
        }
        if rank > 0 {
            self.aging.insert((Key(now_s + AGING_S), place));
        }
        let waiting = Waiting {
            place,
            link,
            ask,
            arrived_s: now_s,
            passed: 0,
            reserved: None,
            turn,
        };
        self.waiting.insert(place, waiting);
        place
    }

    /// Takes an ask out of all lines.
    pub fn remove(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.waiting.remove(&place)?;
        let ask = &waiting.ask;
        self.by_ask.remove(&(waiting.link, ask.number));
        if let Some(places) = self.by_link.get_mut(&waiting.link) {
            places.remove(&place);
            if places.is_empty() {
                self.by_link.remove(&waiting.link);
            }
        }
        for pool in &ask.pools {
            if let Some(line) = self.lines.get_mut(pool) {
                line.order.remove(&waiting.turn);
                line.depth[waiting.turn.rank] -= 1;
                line.picky.remove(&place);
                if line.order.is_empty() {
                    self.lines.remove(pool);
                }
            }
        }
        if let Some(deadline_s) = ask.deadline_s {
            self.deadlines.remove(&(Key(deadline_s), place));
        }
        if waiting.turn.rank > 0 {
            self.aging.remove(&(Key(waiting.moves_up_s()), place));
        }
        Some(waiting)
    }

    /// Moves those up that have waited long.
    pub fn age(&mut self, now_s: f64) {
        while let Some(&(Key(at_s), place)) = self.aging.first() {
            if at_s > now_s {
                break;
            }
            self.aging.pop_first();
            let Some(waiting) = self.waiting.get_mut(&place) else {
                continue;
            };
            let before = waiting.turn;
            waiting.turn.rank -= 1;
            waiting.turn.due = Key(at_s);
            if waiting.turn.rank > 0 {
                self.aging.insert((Key(waiting.moves_up_s()), place));
            }
            for pool in &waiting.ask.pools {
                if let Some(line) = self.lines.get_mut(pool) {
                    line.order.remove(&before);
                    line.order.insert(waiting.turn, place);
                    line.depth[before.rank] -= 1;
                    line.depth[waiting.turn.rank] += 1;
                }
            }
        }
    }

    /// The ask at that place.
    pub fn get(&self, place: Place) -> Option<&Waiting> {
        self.waiting.get(&place)
    }

    /// The same, to change what is not its turn.
    pub fn get_mut(&mut self, place: Place) -> Option<&mut Waiting> {
        self.waiting.get_mut(&place)
    }

    /// The ask of that number, if it waits.
    pub fn find(&self, link: Link, number: u64) -> Option<Place> {
        self.by_ask.get(&(link, number)).copied()
    }

    /// All asks of one router's stream.
    pub fn of_link(&self, link: Link) -> Vec<Place> {
        self.by_link
            .get(&link)
            .map(|places| places.iter().copied().collect())
            .unwrap_or_default()
    }

    /// All asks, in order of arrival.
    pub fn everything(&self) -> Vec<Place> {
        self.waiting.keys().copied().collect()
    }

    /// All asks that stand in line for that pool, next first.
    pub fn of_pool(&self, pool: &str) -> Vec<Place> {
        self.in_turn(pool).map(|waiting| waiting.place).collect()
    }

    /// Those of a pool that refuse some workers.
    pub fn picky(&self, pool: &str) -> Vec<Place> {
        self.lines
            .get(pool)
            .map(|line| line.picky.iter().copied().collect())
            .unwrap_or_default()
    }

    /// The asks of a pool, next first.
    pub fn in_turn(&self, pool: &str) -> impl Iterator<Item = &Waiting> {
        let places = self.lines.get(pool).into_iter().flat_map(|line| line.order.values());
        places.filter_map(|place| self.waiting.get(place))
    }

    /// The place in a pool's line, from 1, of a newcomer: behind all of its class and of higher ones.
    pub fn position(&self, waiting: &Waiting, pool: &str) -> usize {
        self.lines
            .get(pool)
            .map_or(0, |line| line.depth[..=waiting.turn.rank].iter().sum())
    }

    /// The first whose deadline has come.
    pub fn expired(&self, now_s: f64) -> Option<Place> {
        self.deadlines
            .first()
            .filter(|(deadline, _)| deadline.0 <= now_s)
            .map(|&(_, place)| place)
    }

    /// When the next one expires.
    pub fn next_deadline(&self) -> Option<f64> {
        self.deadlines.first().map(|(deadline, _)| deadline.0)
    }
}

impl Waiting {
    /// When it moves up a class, while there is one.
    fn moves_up_s(&self) -> f64 {
        let ranks_up = self.ask.class.rank() - self.turn.rank + 1;
        self.arrived_s + ranks_up as f64 * AGING_S
    }
}

#[cfg(test)]
impl Queue {
    /// What holds after every step: everybody stands where they should, and nobody else does.
    pub(super) fn check(&self) {
        let stands: usize = self.waiting.values().map(|waiting| waiting.ask.pools.len()).sum();
        assert_eq!(stands, self.lines.values().map(|line| line.order.len()).sum::<usize>());
        for waiting in self.waiting.values() {
            for pool in &waiting.ask.pools {
                let line = &self.lines[pool];
                assert_eq!(line.order.get(&waiting.turn), Some(&waiting.place));
                assert_eq!(
                    line.picky.contains(&waiting.place),
                    !waiting.ask.avoid_instances.is_empty()
                );
            }
            assert_eq!(self.find(waiting.link, waiting.ask.number), Some(waiting.place));
            assert!(self.by_link[&waiting.link].contains(&waiting.place));
        }
        assert_eq!(self.by_ask.len(), self.waiting.len());
        assert_eq!(
            self.by_link.values().map(BTreeSet::len).sum::<usize>(),
            self.waiting.len()
        );
        assert_eq!(
            self.deadlines.len(),
            self.waiting
                .values()
                .filter(|each| each.ask.deadline_s.is_some())
                .count()
        );
        assert_eq!(
            self.aging.len(),
            self.waiting.values().filter(|each| each.turn.rank > 0).count()
        );
        for line in self.lines.values() {
            assert!(!line.order.is_empty());
            assert_eq!(line.depth.iter().sum::<usize>(), line.order.len());
            assert!(line.picky.iter().all(|place| self.waiting.contains_key(place)));
        }
    }
}
