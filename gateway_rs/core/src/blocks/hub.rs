//! The cache's side: follows all workers, and lets others follow.
//!
//! What a follower (a *watcher*: a scheduler or router) has not heard yet is not queued for it: each instance has one short
//! log of its last events, and each watcher a cursor into each log. So any number of watchers costs nothing but that, one
//! that reads slowly finds the log moved on and gets a snapshot instead, and whatever waits goes into one message.
//!
//! A worker whose stream ends is not found any more at once. What it held is kept for a little while, so that the same
//! instance can go on from its last event; a new instance at that worker's name ends the old one.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use ahash::HashMap;

use super::{take_in, Blocks, Event, News, Snapshot, Want, NOT_IN_STEP};
use crate::index::{Limits, Overlap};

/// A stream of a worker or a watcher; never used again.
pub type Link = u64;

/// How long what an instance holds is kept when its stream is broken, or when it is known from another cache's time only.
const DETACHED_S: f64 = 5.0;

/// Blocks named in an instance's log at most, but for its last event.
pub const LOG_BLOCKS: usize = 4096;

/// A worker opens its stream.
#[derive(Clone, Debug)]
pub struct Hello {
    /// Its name, the same over restarts.
    pub worker_id: Arc<str>,
    /// New for each start.
    pub instance_id: Arc<str>,
    /// What it serves in.
    pub pool: Arc<str>,
    /// Events from this one on can still be sent.
    pub oldest_sequence: u64,
    /// The next one.
    pub next_sequence: u64,
}

/// Who holds how much of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its name.
    pub worker_id: Arc<str>,
    /// Its start.
    pub instance_id: Arc<str>,
    /// From the prefix's start.
    pub blocks: u32,
}

#[derive(Debug)]
struct Instance {
    worker_id: Arc<str>,
    pool: Arc<str>,
    /// Its stream; None = it is away.
    link: Option<Link>,
    /// When it is forgotten, while it is away.
    expires_s: f64,
    log: VecDeque<Event>,
    /// Blocks named there.
    log_blocks: usize,
}

#[derive(Debug, Default)]
struct Watcher {
    /// The next event for it, by instance; it knows nothing of those that are not here.
    cursors: HashMap<Arc<str>, u64>,
    /// Instances that it may have to hear of.
    owed: BTreeSet<Arc<str>>,
    /// Instances that it knows and that have not come back yet, until when.
    remembered: HashMap<Arc<str>, u64>,
    until_s: f64,
}

/// See the module's text. What wakes watchers is returned as the links of those that [`Hub::news`] has something for.
#[derive(Debug)]
pub struct Hub {
    blocks: Blocks,
    instances: HashMap<Arc<str>, Instance>,
    links: HashMap<Link, Arc<str>>,
    watchers: HashMap<Link, Watcher>,
}

impl Hub {
    /// Knows nobody.
    #[must_use]
    pub fn new(limits: Limits, seed: u64) -> Self {
        Self {
            blocks: Blocks::new(limits, seed),
            instances: HashMap::default(),
            links: HashMap::default(),
            watchers: HashMap::default(),
        }
    }

    /// Who holds what.
    #[must_use]
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Workers whose stream is open.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.links.len()
    }

    /// Schedulers and routers that follow.
    #[must_use]
    pub fn watchers(&self) -> usize {
        self.watchers.len()
    }

    // Workers.

    /// A worker opens its stream.
    pub fn hello(&mut self, link: Link, hello: &Hello, woken: &mut Vec<Link>) -> Want {
        let (id, pool) = (&hello.instance_id, &hello.pool);
        let same = |other: &Instance| (&other.pool, &other.worker_id) == (pool, &hello.worker_id);
        let ended: Vec<_> = self
            .instances
            .iter()
            .filter(|(other, each)| *other != id && same(each))
            .map(|(other, _)| other.clone())
            .collect();
        for other in ended {
            self.forget(&other, woken);
        }
        if self.instances.get(id).is_some_and(|known| known.pool != *pool) {
            self.forget(id, woken);
        }
        let instance = self.instances.entry(id.clone()).or_insert_with(|| Instance {
            worker_id: hello.worker_id.clone(),
            pool: pool.clone(),
            link: None,
            expires_s: f64::INFINITY,
            log: VecDeque::new(),
            log_blocks: 0,
        });
        if let Some(before) = instance.link.replace(link) {
            self.links.remove(&before);
        }
        instance.worker_id = hello.worker_id.clone();
        instance.expires_s = f64::INFINITY;
        self.links.insert(link, id.clone());
        for watcher in self.watchers.values_mut() {
            if let Some(next) = watcher.remembered.remove(id) {
                watcher.cursors.insert(id.clone(), next);
            }
        }
        self.blocks.follow(id, hello.oldest_sequence, hello.next_sequence)
    }

    /// Events of a worker. When one is missing, the answer is what to ask it for.
    pub fn events(&mut self, link: Link, events: Vec<Event>, woken: &mut Vec<Link>) -> Option<Want> {
        let id = self.links.get(&link)?.clone();
        let instance = self.instances.get_mut(&id)?;
        let mut want = None;
        let mut changed = false;
        for event in events {
            match self.blocks.apply(&id, &event) {
                Ok(true) => {
                    changed = true;
                    instance.log_blocks += event.change.len();
                    instance.log.push_back(event);
                    while instance.log_blocks > LOG_BLOCKS && instance.log.len() > 1 {
                        let oldest = instance.log.pop_front();
                        instance.log_blocks -= oldest.map_or(0, |event| event.change.len());
                    }
                }
                Ok(false) => {}
                Err(wanted) => {
                    want = Some(wanted);
                    break;
                }
            }
        }
        if changed {
            self.owe(&id, woken);
        }
        want
    }

    /// All that a worker holds.
    pub fn snapshot(&mut self, link: Link, snapshot: Snapshot, woken: &mut Vec<Link>) {
        let Some(id) = self.links.get(&link).cloned() else {
            return;
        };
        // Late: more has been seen than it knows.
        if self
            .blocks
            .next_sequence(&id)
            .is_some_and(|known| known > snapshot.next_sequence)
        {
            return;
        }
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.log.clear();
            instance.log_blocks = 0;
        }
        let news = News {
            instance_id: id.clone(),
            gone: false,
            snapshot: Some(snapshot),
            events: Vec::new(),
        };
        take_in(&news, |work| work(&mut self.blocks));
        self.owe(&id, woken);
    }

    /// A worker's stream ended; it may come back. (A break and a goodbye cannot be told apart for certain.)
    pub fn lost(&mut self, now_s: f64, link: Link) {
        if let Some(instance) = self.links.remove(&link).and_then(|id| self.instances.get_mut(&id)) {
            instance.link = None;
            instance.expires_s = now_s + DETACHED_S;
        }
    }

    fn forget(&mut self, id: &Arc<str>, woken: &mut Vec<Link>) {
        if let Some(link) = self.instances.remove(id).and_then(|instance| instance.link) {
            self.links.remove(&link);
        }
        self.blocks.lose(id);
        self.owe(id, woken);
    }

    // Time.

    /// Forgets those that did not come back in time.
    pub fn expire(&mut self, now_s: f64, woken: &mut Vec<Link>) {
        let due = self.instances.iter().filter(|(_, each)| each.expires_s <= now_s);
        let due: Vec<_> = due.map(|(id, _)| id.clone()).collect();
        for id in due {
            self.forget(&id, woken);
        }
        for (&link, watcher) in &mut self.watchers {
            if watcher.until_s <= now_s && !watcher.remembered.is_empty() {
                for (id, next) in watcher.remembered.drain() {
                    watcher.cursors.insert(id.clone(), next);
                    watcher.owed.insert(id);
                }
                woken.push(link);
            }
        }
    }

    /// When to call that; None = not before something happens.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<f64> {
        let away = self.instances.values().map(|instance| instance.expires_s);
        let remembered = self.watchers.values().filter(|watcher| !watcher.remembered.is_empty());
        let earliest_s = away
            .chain(remembered.map(|watcher| watcher.until_s))
            .fold(f64::INFINITY, f64::min);
        earliest_s.is_finite().then_some(earliest_s)
    }

    // Watchers.

    /// A watcher opens its stream; `known` is what it knows from an earlier one: instances, each with the next event.
    pub fn watch(&mut self, now_s: f64, link: Link, known: Vec<(Arc<str>, u64)>) {
        let mut watcher = Watcher {
            until_s: now_s + DETACHED_S,
            owed: self.instances.keys().cloned().collect(),
            ..Watcher::default()
        };
        for (id, next) in known {
            if self.instances.contains_key(&id) {
                watcher.cursors.insert(id, next);
            } else {
                // Perhaps it has not found this cache yet.
                watcher.remembered.insert(id, next);
            }
        }
        self.watchers.insert(link, watcher);
    }

    /// A watcher has lost track of an instance.
    pub fn lost_track(&mut self, link: Link, id: &Arc<str>) {
        if let Some(watcher) = self.watchers.get_mut(&link) {
            // It still knows of it, and must hear when it is gone.
            watcher.cursors.insert(id.clone(), NOT_IN_STEP);
            watcher.owed.insert(id.clone());
        }
    }

    /// A watcher's stream ended.
    pub fn unwatch(&mut self, link: Link) {
        self.watchers.remove(&link);
    }

    /// What a watcher is to hear next, of about so many blocks; empty = nothing.
    pub fn news(&mut self, link: Link, blocks: usize) -> Vec<News> {
        let mut all = Vec::new();
        let mut named = 0;
        let Some(watcher) = self.watchers.get_mut(&link) else {
            return all;
        };
        while named < blocks {
            let Some(id) = watcher.owed.pop_first() else { break };
            let known = watcher.cursors.get(&id).copied();
            let Some(instance) = self.instances.get(&id) else {
                if watcher.cursors.remove(&id).is_some() {
                    all.push(News {
                        instance_id: id,
                        gone: true,
                        snapshot: None,
                        events: Vec::new(),
                    });
                }
                continue;
            };
            // Not known here either: it is owed again when its snapshot has come.
            let Some(next) = self.blocks.next_sequence(&id) else {
                continue;
            };
            let oldest = instance.log.front().map_or(next, |event| event.sequence);
            let (mut snapshot, mut events) = (None, Vec::new());
            match known {
                Some(known) if oldest <= known && known <= next => {
                    events.extend(instance.log.iter().skip((known - oldest) as usize).cloned());
                }
                _ => snapshot = self.blocks.snapshot(&id),
            }
            watcher.cursors.insert(id.clone(), next);
            if snapshot.is_none() && events.is_empty() {
                continue;
            }
            named += 16 + events.iter().map(|event| event.change.len()).sum::<usize>();
            named += snapshot
                .iter()
                .flat_map(|snapshot| &snapshot.chains)
                .map(|chain| chain.1.len())
                .sum::<usize>();
            all.push(News {
                instance_id: id,
                gone: false,
                snapshot,
                events,
            });
        }
        all
    }

    /// Whether there is more for a watcher.
    #[must_use]
    pub fn owes(&self, link: Link) -> bool {
        self.watchers.get(&link).is_some_and(|watcher| !watcher.owed.is_empty())
    }

    fn owe(&mut self, id: &Arc<str>, woken: &mut Vec<Link>) {
        for (&link, watcher) in &mut self.watchers {
            if watcher.owed.insert(id.clone()) {
                woken.push(link);
            }
        }
    }

    // Looking.

    /// Who holds the beginning of a prefix, longest first; only those that can be reached.
    #[must_use]
    pub fn find(&self, pool: &str, blocks: &[u64]) -> Vec<Holder> {
        let mut overlaps: Vec<Overlap> = Vec::new();
        self.blocks.index().overlap(blocks, &mut overlaps);
        let mut found: Vec<Holder> = overlaps
            .into_iter()
            .filter_map(|overlap| {
                let id = self.blocks.name(overlap.worker)?;
                let instance = self
                    .instances
                    .get(id)
                    .filter(|instance| instance.link.is_some() && &*instance.pool == pool)?;
                Some(Holder {
                    worker_id: instance.worker_id.clone(),
                    instance_id: id.clone(),
                    blocks: overlap.blocks,
                })
            })
            .collect();
        found.sort_by(|a, b| (b.blocks.cmp(&a.blocks)).then_with(|| a.worker_id.cmp(&b.worker_id)));
        found
    }
}
