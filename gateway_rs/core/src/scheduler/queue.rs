//! Whose turn it is: the asks that wait, for each pool in the order in which they will be served.
//!
//! The order: class first (interactive, standard, batch), then tenants with credit before those in debt (`fair.rs`), then
//! who is due first. An ask that has waited [`AGING_S`] moves one class up and is due at once there, so that no class is passed
//! over for ever; but only so many of a pool at once, the oldest first, or an hour's backlog would be interactive after a
//! minute.
//!
//! An ask that may run in several pools stands in line in each of them and leaves all lines at once. One that has its worker
//! already, and waits for that worker's prompts to be computed, stands in that worker's line too. Adding, withdrawing and
//! taking cost O(pools of the ask, log of the line); finding the next one O(tenants in debt that are due earlier). How many
//! may wait is the core's rule, and so is what fits where.

use std::{
    cmp::Reverse,
    collections::{btree_set, BTreeMap, BTreeSet, BinaryHeap},
    iter::Peekable,
    ops::Bound,
    sync::Arc,
};

use super::{
    events::{Ask, Link},
    fair::{AccountId, Accounts},
    map::{Key, Map},
};

/// Batch work is interactive after a minute: long enough to matter under load, short enough to promise.
pub const AGING_S: f64 = 30.0;

const RANKS: usize = 3;

/// The number of an ask in the queue, in order of arrival.
pub type Place = u64;

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
    /// Its tenant's account.
    pub account: AccountId,
    /// Asks from behind that were served while this one was first in line and did not fit.
    pub passed: u32,
    /// The worker that keeps its room for it.
    pub reserved: Option<Link>,
    /// The worker that it waits for, while that one computes other prompts.
    pub plan: Option<Plan>,
    rank: usize,
    due: Key,
}

/// A worker that is to run an ask when it has come so far.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Its stream.
    pub worker: Link,
    /// Predicted work of the prompt there.
    pub prefill_ms: f64,
    /// Prompt tokens that it is believed to hold.
    pub hit_tokens: u32,
    /// And the rest.
    pub uncached_tokens: u32,
    /// Of the prompt's blocks, those that it held.
    pub held_blocks: usize,
}

/// Whose prompt is computed first where tenants do not matter: lower is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Urgency {
    /// Its class, or a higher one when it has waited long.
    pub rank: usize,
    /// When it is due.
    pub due: Key,
}

/// Where an ask comes in a line: lower is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    rank: usize,
    in_debt: bool,
    due: Key,
    place: Place,
}

type Head = (Key, Place, AccountId);

/// Asks of one class in a line, by account and when they are due.
#[derive(Debug, Default)]
struct Rank {
    accounts: BTreeMap<AccountId, BTreeSet<(Key, Place)>>,
    /// The first of each account.
    heads: BTreeSet<Head>,
}

impl Rank {
    fn insert(&mut self, account: AccountId, due: Key, place: Place) {
        let asks = self.accounts.entry(account).or_default();
        let before = asks.first().copied();
        asks.insert((due, place));
        self.note_head(account, before);
    }

    fn remove(&mut self, account: AccountId, due: Key, place: Place) {
        if let Some(asks) = self.accounts.get_mut(&account) {
            let before = asks.first().copied();
            asks.remove(&(due, place));
            self.note_head(account, before);
        }
    }

    fn note_head(&mut self, account: AccountId, before: Option<(Key, Place)>) {
        let now = self.accounts.get(&account).and_then(|asks| asks.first().copied());
        if before == now {
            return;
        }
        if let Some((due, place)) = before {
            self.heads.remove(&(due, place, account));
        }
        match now {
            Some((due, place)) => {
                self.heads.insert((due, place, account));
            }
            None => {
                self.accounts.remove(&account);
            }
        }
    }

    /// Those whose account has credit, or those whose has none, by when they are due.
    fn merged<'a>(&'a self, accounts: &'a Accounts, credit: bool) -> Merged<'a> {
        Merged {
            rank: self,
            accounts,
            credit,
            heads: self.heads.iter().peekable(),
            next: BinaryHeap::new(),
        }
    }
}

/// Several accounts' asks as one sequence. Accounts are looked at only when their turn may have come.
struct Merged<'a> {
    rank: &'a Rank,
    accounts: &'a Accounts,
    credit: bool,
    heads: Peekable<btree_set::Iter<'a, Head>>,
    next: BinaryHeap<Reverse<Head>>,
}

impl Iterator for Merged<'_> {
    type Item = Place;

    fn next(&mut self) -> Option<Place> {
        while self
            .heads
            .next_if(|&&(_, _, account)| self.accounts.has_credit(account) != self.credit)
            .is_some()
        {}
        let from_heads = match (self.heads.peek(), self.next.peek()) {
            (Some(head), Some(Reverse(next))) => **head < *next,
            (head, _) => head.is_some(),
        };
        let (due, place, account) = if from_heads {
            *self.heads.next()?
        } else {
            self.next.pop()?.0
        };
        let asks = self.rank.accounts.get(&account)?;
        let mut after = asks.range((Bound::Excluded((due, place)), Bound::Unbounded));
        if let Some(&(due, place)) = after.next() {
            self.next.push(Reverse((due, place, account)));
        }
        Some(place)
    }
}

/// Asks that wait for the same thing.
#[derive(Debug, Default)]
struct Line {
    ranks: [Rank; RANKS],
    /// How many of each class.
    depth: [usize; RANKS],
    /// Those that refuse some workers; a worker's loss may leave them without any.
    picky: BTreeSet<Place>,
}

impl Line {
    fn insert(&mut self, waiting: &Waiting) {
        self.ranks[waiting.rank].insert(waiting.account, waiting.due, waiting.place);
        self.depth[waiting.rank] += 1;
        if !waiting.ask.avoid_instances.is_empty() {
            self.picky.insert(waiting.place);
        }
    }

    fn remove(&mut self, waiting: &Waiting) {
        self.ranks[waiting.rank].remove(waiting.account, waiting.due, waiting.place);
        self.depth[waiting.rank] -= 1;
        self.picky.remove(&waiting.place);
    }

    fn len(&self) -> usize {
        self.depth.iter().sum()
    }

    fn in_turn<'a>(&'a self, accounts: &'a Accounts) -> impl Iterator<Item = Place> + 'a {
        let both = [true, false];
        let ranks = self.ranks.iter();
        ranks.flat_map(move |rank| both.into_iter().flat_map(move |credit| rank.merged(accounts, credit)))
    }
}

/// All asks that wait.
#[derive(Debug)]
pub struct Queue {
    /// What tenants have had.
    pub accounts: Accounts,
    waiting: BTreeMap<Place, Waiting>,
    by_ask: Map<(Link, u64), Place>,
    by_link: Map<Link, BTreeSet<Place>>,
    lines: Map<Arc<str>, Line>,
    /// Those that have their worker already.
    plans: Map<Link, Line>,
    deadlines: BTreeSet<(Key, Place)>,
    /// When each moves up from its own class, by the first of its pools.
    aging: Map<Arc<str>, BTreeSet<(Key, Place)>>,
    /// And who has moved up already, from there.
    rising: BTreeSet<(Key, Place)>,
    /// How many that have moved up wait, by the first of their pools.
    aged: Map<Arc<str>, u64>,
    /// All, by class; of a class the last to come is last.
    by_rank: BTreeSet<(usize, Place)>,
    last: Place,
}

impl Queue {
    pub(super) fn new(accounts: Accounts) -> Self {
        Self {
            accounts,
            waiting: BTreeMap::new(),
            by_ask: Map::default(),
            by_link: Map::default(),
            lines: Map::default(),
            plans: Map::default(),
            deadlines: BTreeSet::new(),
            aging: Map::default(),
            rising: BTreeSet::new(),
            aged: Map::default(),
            by_rank: BTreeSet::new(),
            last: 0,
        }
    }

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

    /// Puts an ask in line; it is due then. It must name a pool.
    pub(super) fn add(&mut self, now_s: f64, due_s: f64, link: Link, ask: Box<Ask>) -> Place {
        self.last += 1;
        let (place, rank) = (self.last, ask.class.rank());
        let nowhere = Arc::from("");
        let account = self.accounts.open(ask.pools.first().unwrap_or(&nowhere), &ask.tenant);
        let waiting = Waiting {
            place,
            link,
            ask,
            arrived_s: now_s,
            account,
            passed: 0,
            reserved: None,
            plan: None,
            rank,
            due: Key(due_s),
        };
        self.by_ask.insert((link, waiting.ask.number), place);
        self.by_link.entry(link).or_default().insert(place);
        for pool in &waiting.ask.pools {
            self.lines.entry(pool.clone()).or_default().insert(&waiting);
        }
        if let Some(deadline_s) = waiting.ask.deadline_s {
            self.deadlines.insert((Key(deadline_s), place));
        }
        if let Some(pool) = waiting.ask.pools.first().filter(|_| rank > 0) {
            let aging = self.aging.entry(pool.clone()).or_default();
            aging.insert((Key(now_s + AGING_S), place));
        }
        self.by_rank.insert((rank, place));
        self.waiting.insert(place, waiting);
        place
    }

    /// Takes an ask out of all lines. Its account stays open: it is the caller's to close.
    pub(super) fn remove(&mut self, place: Place) -> Option<Waiting> {
        self.unplan(place);
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
                line.remove(&waiting);
                if line.len() == 0 {
                    self.lines.remove(pool);
                }
            }
        }
        if let Some(deadline_s) = ask.deadline_s {
            self.deadlines.remove(&(Key(deadline_s), place));
        }
        self.rising.remove(&(Key(waiting.moves_up_s()), place));
        if let Some(pool) = ask.pools.first() {
            if waiting.has_moved_up() {
                take_one(&mut self.aged, pool);
            } else if let Some(aging) = self.aging.get_mut(pool) {
                aging.remove(&(Key(waiting.moves_up_s()), place));
                if aging.is_empty() {
                    self.aging.remove(pool);
                }
            }
        }
        self.by_rank.remove(&(waiting.rank, place));
        Some(waiting)
    }

    /// The ask waits for that worker.
    pub(super) fn plan(&mut self, place: Place, plan: Plan) {
        if let Some(waiting) = self.waiting.get_mut(&place) {
            waiting.plan = Some(plan);
            self.plans.entry(plan.worker).or_default().insert(waiting);
        }
    }

    /// It does not any more; returns what was planned.
    pub(super) fn unplan(&mut self, place: Place) -> Option<Plan> {
        let waiting = self.waiting.get_mut(&place)?;
        let plan = waiting.plan.take()?;
        if let Some(line) = self.plans.get_mut(&plan.worker) {
            line.remove(waiting);
            if line.len() == 0 {
                self.plans.remove(&plan.worker);
            }
        }
        Some(plan)
    }

    /// Of the lowest class that waits, the last to come.
    pub(super) fn least(&self) -> Option<Place> {
        self.by_rank.last().map(|&(_, place)| place)
    }

    /// Moves those up that have waited long, while no more of a pool have than `most` says.
    pub(super) fn age(&mut self, now_s: f64, most: impl Fn(&str) -> u64) {
        let mut due: Vec<Place> = Vec::new();
        for (pool, aging) in &mut self.aging {
            if aging.first().is_none_or(|&(Key(at_s), _)| at_s > now_s) {
                continue;
            }
            let room = most(pool).saturating_sub(self.aged.get(pool).copied().unwrap_or(0));
            for _ in 0..room {
                match aging.first() {
                    Some(&(Key(at_s), place)) if at_s <= now_s => {
                        aging.pop_first();
                        due.push(place);
                    }
                    _ => break,
                }
            }
        }
        if !due.is_empty() {
            self.aging.retain(|_, aging| !aging.is_empty());
        }
        for place in due {
            if let Some(pool) = self.waiting.get(&place).and_then(|waiting| waiting.ask.pools.first()) {
                *self.aged.entry(pool.clone()).or_default() += 1;
            }
            self.move_up(place);
        }
        while let Some(&(Key(at_s), place)) = self.rising.first() {
            if at_s > now_s {
                break;
            }
            self.rising.pop_first();
            self.move_up(place);
        }
    }

    fn move_up(&mut self, place: Place) {
        let Some(mut waiting) = self.waiting.remove(&place) else {
            return;
        };
        self.each_line(&waiting, |line| line.remove(&waiting));
        self.by_rank.remove(&(waiting.rank, place));
        waiting.due = Key(waiting.moves_up_s());
        waiting.rank -= 1;
        self.by_rank.insert((waiting.rank, place));
        self.each_line(&waiting, |line| line.insert(&waiting));
        if waiting.rank > 0 {
            self.rising.insert((Key(waiting.moves_up_s()), place));
        }
        self.waiting.insert(place, waiting);
    }

    /// All lines in which an ask stands.
    fn each_line(&mut self, waiting: &Waiting, mut change: impl FnMut(&mut Line)) {
        for pool in &waiting.ask.pools {
            if let Some(line) = self.lines.get_mut(pool) {
                change(line);
            }
        }
        if let Some(line) = waiting.plan.and_then(|plan| self.plans.get_mut(&plan.worker)) {
            change(line);
        }
    }

    /// The ask at that place.
    pub fn get(&self, place: Place) -> Option<&Waiting> {
        self.waiting.get(&place)
    }

    /// The same, to change what is not its turn.
    pub(super) fn get_mut(&mut self, place: Place) -> Option<&mut Waiting> {
        self.waiting.get_mut(&place)
    }

    /// The ask of that number, if it waits.
    pub fn find(&self, link: Link, number: u64) -> Option<Place> {
        self.by_ask.get(&(link, number)).copied()
    }

    /// All asks of one router's stream.
    pub fn of_link(&self, link: Link) -> Vec<Place> {
        let places = self.by_link.get(&link);
        places
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
        let places = self
            .lines
            .get(pool)
            .into_iter()
            .flat_map(|line| line.in_turn(&self.accounts));
        places.filter_map(|place| self.waiting.get(&place))
    }

    /// The asks that wait for that worker, next first.
    pub fn planned(&self, worker: Link) -> impl Iterator<Item = &Waiting> {
        let places = self
            .plans
            .get(&worker)
            .into_iter()
            .flat_map(|line| line.in_turn(&self.accounts));
        places.filter_map(|place| self.waiting.get(&place))
    }

    /// Whether somebody waits in that pool.
    pub fn waits_in(&self, pool: &str) -> bool {
        self.lines.contains_key(pool)
    }

    /// Whether somebody waits for that worker.
    pub fn waits_for(&self, worker: Link) -> bool {
        self.plans.contains_key(&worker)
    }

    /// Where an ask comes among others, now.
    pub fn turn(&self, waiting: &Waiting) -> Turn {
        Turn {
            rank: waiting.rank,
            in_debt: !self.accounts.has_credit(waiting.account),
            due: waiting.due,
            place: waiting.place,
        }
    }

    /// The place in a pool's line, from 1, of a newcomer: behind all of its class and of higher ones.
    pub fn position(&self, waiting: &Waiting, pool: &str) -> usize {
        self.lines
            .get(pool)
            .map_or(0, |line| line.depth[..=waiting.rank].iter().sum())
    }

    /// The first whose deadline has come.
    pub fn expired(&self, now_s: f64) -> Option<Place> {
        let first = self.deadlines.first().filter(|(deadline, _)| deadline.0 <= now_s);
        first.map(|&(_, place)| place)
    }

    /// When the next one expires.
    pub fn next_deadline(&self) -> Option<f64> {
        self.deadlines.first().map(|(deadline, _)| deadline.0)
    }
}

/// One less of these; none is no entry.
fn take_one(counts: &mut Map<Arc<str>, u64>, of: &Arc<str>) {
    if let Some(count) = counts.get_mut(of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(of);
        }
    }
}

impl Waiting {
    /// Its class, or a higher one when it has waited long.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Among prompts at a worker.
    pub fn urgency(&self) -> Urgency {
        Urgency {
            rank: self.rank,
            due: self.due,
        }
    }

    /// Whether it has waited so long that it has a higher class than its own.
    pub fn has_moved_up(&self) -> bool {
        self.rank < self.ask.class.rank()
    }

    /// When it moves up a class, while there is one.
    fn moves_up_s(&self) -> f64 {
        let ranks_up = self.ask.class.rank() - self.rank + 1;
        self.arrived_s + ranks_up as f64 * AGING_S
    }
}

#[cfg(test)]
impl Queue {
    /// What holds after every step: everybody stands where they should, and nobody else does.
    pub(super) fn check(&self) {
        let stands: usize = self.waiting.values().map(|waiting| waiting.ask.pools.len()).sum();
        assert_eq!(stands, self.lines.values().map(Line::len).sum::<usize>());
        let planned = self.waiting.values().filter(|waiting| waiting.plan.is_some()).count();
        assert_eq!(planned, self.plans.values().map(Line::len).sum::<usize>());
        let in_line = |line: &Line, waiting: &Waiting| {
            let asks = &line.ranks[waiting.rank].accounts[&waiting.account];
            assert!(asks.contains(&(waiting.due, waiting.place)));
            assert_eq!(
                line.picky.contains(&waiting.place),
                !waiting.ask.avoid_instances.is_empty()
            );
        };
        for waiting in self.waiting.values() {
            for pool in &waiting.ask.pools {
                in_line(&self.lines[pool], waiting);
            }
            if let Some(plan) = waiting.plan {
                in_line(&self.plans[&plan.worker], waiting);
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
        let (mut aging, mut rising, mut aged) = (0, 0, BTreeMap::new());
        for each in self.waiting.values() {
            if each.has_moved_up() {
                *aged.entry(each.ask.pools[0].clone()).or_insert(0) += 1;
                rising += usize::from(each.rank > 0);
            } else {
                aging += usize::from(each.rank > 0);
            }
        }
        assert_eq!(self.aging.values().map(BTreeSet::len).sum::<usize>(), aging);
        assert_eq!(self.rising.len(), rising);
        assert_eq!(
            self.aged
                .iter()
                .map(|(pool, &count)| (pool.clone(), count))
                .collect::<BTreeMap<_, _>>(),
            aged
        );
        let by_rank: BTreeSet<_> = self.waiting.values().map(|each| (each.rank, each.place)).collect();
        assert_eq!(self.by_rank, by_rank);
        for line in self.lines.values().chain(self.plans.values()) {
            assert!(line.len() > 0);
            let asks = |rank: &Rank| rank.accounts.values().map(BTreeSet::len).sum::<usize>();
            for (rank, depth) in line.ranks.iter().zip(line.depth) {
                assert_eq!(asks(rank), depth);
                assert_eq!(rank.heads.len(), rank.accounts.len());
            }
            let turns: Vec<_> = line
                .in_turn(&self.accounts)
                .map(|place| self.turn(&self.waiting[&place]))
                .collect();
            assert_eq!(turns.len(), line.len());
            assert!(turns.is_sorted(), "{turns:?}");
        }
    }
}
