//! News that is lost, doubled, out of order; streams that break; workers, caches and watchers that restart.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;

/// Events that a worker can send again.
const KEPT: usize = 4;

/// A worker: what it holds, and its side of the stream.
struct Worker {
    name: usize,
    instance: u32,
    held: Vec<u64>,
    log: VecDeque<Event>,
    next: u64,
    link: Link,
    /// On their way to the cache.
    sent: VecDeque<ToHub>,
    /// From where on it sends; None = it waits to be told.
    from: Option<u64>,
}

enum ToHub {
    Hello(Hello),
    Snapshot(Snapshot),
    Events(Vec<Event>),
}

impl Worker {
    fn new(name: usize, instance: u32) -> Self {
        Self {
            name,
            instance,
            held: Vec::new(),
            log: VecDeque::new(),
            next: 1,
            link: 0,
            sent: VecDeque::new(),
            from: None,
        }
    }

    fn id(&self) -> Arc<str> {
        format!("w{}-{}", self.name, self.instance).into()
    }

    fn oldest(&self) -> u64 {
        self.log.front().map_or(self.next, |event| event.sequence)
    }

    fn connect(&mut self, link: Link) {
        self.link = link;
        self.from = None;
        self.sent = VecDeque::from([ToHub::Hello(Hello {
            worker_id: format!("w{}", self.name).into(),
            instance_id: self.id(),
            pool: "p".into(),
            oldest_sequence: self.oldest(),
            next_sequence: self.next,
        })]);
    }

    fn happen(&mut self, change: Change) {
        match &change {
            Change::Stored { blocks, .. } => blocks.iter().for_each(|block| {
                if !self.held.contains(block) {
                    self.held.push(*block);
                }
            }),
            Change::Removed(blocks) => self.held.retain(|block| !blocks.contains(block)),
            Change::Cleared => self.held.clear(),
        }
        self.log.push_back(Event {
            sequence: self.next,
            change,
        });
        self.next += 1;
        if self.log.len() > KEPT {
            self.log.pop_front();
        }
    }

    fn told(&mut self, want: Want, link: Link) {
        match want {
            Want::From(sequence) => self.from = Some(sequence),
            Want::Snapshot => {
                let chains = self.held.iter().map(|&block| (NO_BLOCK, vec![block])).collect();
                self.sent.push_back(ToHub::Snapshot(Snapshot {
                    next_sequence: self.next,
                    chains,
                }));
                self.from = Some(self.next);
            }
        }
        self.send(link);
    }

    /// Sends what there is; begins anew on `link` when it has fallen behind.
    fn send(&mut self, link: Link) {
        let Some(from) = self.from else { return };
        if from < self.oldest() {
            self.connect(link);
            return;
        }
        let events: Vec<_> = self.log.iter().skip((from - self.oldest()) as usize).cloned().collect();
        if !events.is_empty() {
            self.from = Some(self.next);
            self.sent.push_back(ToHub::Events(events));
        }
    }
}

/// A scheduler or router.
struct Watcher {
    blocks: Blocks,
    link: Link,
    sent: VecDeque<News>,
    lost: Vec<Arc<str>>,
}

struct World {
    hub: Hub,
    workers: Vec<Worker>,
    watchers: Vec<Watcher>,
    now_s: f64,
    links: Link,
    restarts: u32,
}

#[derive(Clone, Debug)]
enum Step {
    Stored(usize, Vec<u64>),
    Removed(usize, Vec<u64>),
    Cleared(usize),
    /// One message of a worker arrives.
    Arrives(usize),
    /// Of those on their way, one is lost, doubled or overtaken.
    Mangled(usize, Mangle),
    Breaks(usize),
    Restarts(usize),
    /// The cache is another one.
    HubRestarts,
    Watches(usize),
    WatcherMangled(usize, Mangle),
    WatcherBreaks(usize),
    WatcherRestarts(usize),
    Time(f64),
}

#[derive(Clone, Copy, Debug)]
enum Mangle {
    Lost,
    Doubled,
    Overtaken,
}

const WORKERS: usize = 3;
const WATCHERS: usize = 2;

impl World {
    fn new() -> Self {
        let mut world = Self {
            hub: Hub::new(Limits::default(), 1),
            workers: (0..WORKERS).map(|name| Worker::new(name, 0)).collect(),
            watchers: Vec::new(),
            now_s: 0.0,
            links: 0,
            restarts: 0,
        };
        for at in 0..WORKERS {
            let link = world.link();
            world.workers[at].connect(link);
        }
        for _ in 0..WATCHERS {
            let link = world.link();
            world.watchers.push(Watcher {
                blocks: Blocks::default(),
                link,
                sent: VecDeque::new(),
                lost: Vec::new(),
            });
            world.hub.watch(0.0, link, Vec::new());
        }
        world
    }

    fn link(&mut self) -> Link {
        self.links += 1;
        self.links
    }

    fn step(&mut self, step: Step) {
        let spare = self.link();
        match step {
            Step::Stored(at, blocks) => {
                let parent = self.workers[at].held.last().copied().filter(|_| blocks[0] % 2 == 0);
                let parent = parent.unwrap_or(NO_BLOCK);
                self.workers[at].happen(Change::Stored { parent, blocks });
                self.workers[at].send(spare);
            }
            Step::Removed(at, blocks) => {
                self.workers[at].happen(Change::Removed(blocks));
                self.workers[at].send(spare);
            }
            Step::Cleared(at) => {
                self.workers[at].happen(Change::Cleared);
                self.workers[at].send(spare);
            }
            Step::Arrives(at) => self.arrives(at),
            Step::Mangled(at, how) => {
                let sent = &mut self.workers[at].sent;
                mangle(sent, how, |message| match message {
                    ToHub::Events(events) => Some(ToHub::Events(events.clone())),
                    _ => None,
                });
            }
            Step::Breaks(at) => {
                self.hub.lost(self.now_s, self.workers[at].link);
                self.workers[at].connect(spare);
            }
            Step::Restarts(at) => {
                self.hub.lost(self.now_s, self.workers[at].link);
                self.restarts += 1;
                self.workers[at] = Worker::new(at, self.restarts);
                self.workers[at].connect(spare);
            }
            Step::HubRestarts => {
                self.hub = Hub::new(Limits::default(), 2);
                for at in 0..WORKERS {
                    let link = self.link();
                    self.workers[at].connect(link);
                }
                (0..WATCHERS).for_each(|at| self.watch(at));
            }
            Step::Watches(at) => {
                let link = self.watchers[at].link;
                for id in std::mem::take(&mut self.watchers[at].lost) {
                    self.hub.lost_track(link, &id);
                }
                self.watchers[at].sent.extend(self.hub.news(link, 8));
                let watcher = &mut self.watchers[at];
                if let Some(news) = watcher.sent.pop_front() {
                    if take_in(&news, |work| work(&mut watcher.blocks)) {
                        watcher.lost.push(news.instance_id);
                    }
                }
            }
            Step::WatcherMangled(at, how) => {
                let only_events = |news: &News| (!news.gone && news.snapshot.is_none()).then(|| news.clone());
                mangle(&mut self.watchers[at].sent, how, only_events);
            }
            Step::WatcherBreaks(at) => self.watch(at),
            Step::WatcherRestarts(at) => {
                self.watchers[at].blocks = Blocks::default();
                self.watch(at);
            }
            Step::Time(s) => {
                self.now_s += s;
                self.hub.expire(self.now_s, &mut Vec::new());
            }
        }
    }

    fn arrives(&mut self, at: usize) {
        let spare = self.link();
        let worker = &mut self.workers[at];
        let mut woken = Vec::new();
        let want = match worker.sent.pop_front() {
            None => None,
            Some(ToHub::Hello(hello)) => Some(self.hub.hello(worker.link, &hello, &mut woken)),
            Some(ToHub::Events(events)) => self.hub.events(worker.link, events, &mut woken),
            Some(ToHub::Snapshot(snapshot)) => {
                self.hub.snapshot(worker.link, snapshot, &mut woken);
                None
            }
        };
        if let Some(want) = want {
            worker.told(want, spare);
        }
    }

    fn watch(&mut self, at: usize) {
        let link = self.link();
        let watcher = &mut self.watchers[at];
        self.hub.unwatch(watcher.link);
        watcher.link = link;
        watcher.sent.clear();
        watcher.lost.clear();
        let known = watcher.blocks.known().map(|(id, next)| (id.clone(), next)).collect();
        self.hub.watch(self.now_s, link, known);
    }

    /// One more event of each worker, then everything arrives, and who is gone is forgotten.
    fn come_to_rest(&mut self) {
        for at in 0..WORKERS {
            self.step(Step::Stored(at, vec![1000 + at as u64]));
        }
        for _ in 0..4 {
            for at in 0..WORKERS {
                while !self.workers[at].sent.is_empty() {
                    self.arrives(at);
                }
            }
            for at in 0..WATCHERS {
                for _ in 0..100 {
                    self.step(Step::Watches(at));
                }
            }
            self.step(Step::Time(DETACHED));
        }
    }

    fn check(&self) {
        let held = |blocks: &Blocks, id: &str| -> BTreeSet<u64> {
            let number = blocks.number(id);
            number
                .into_iter()
                .flat_map(|number| blocks.index().held(number))
                .flatten()
                .collect()
        };
        let mut holdings = 0;
        for worker in &self.workers {
            let truth: BTreeSet<u64> = worker.held.iter().copied().collect();
            holdings += truth.len();
            assert_eq!(
                held(self.hub.blocks(), &worker.id()),
                truth,
                "the cache, {}",
                worker.id()
            );
            for watcher in &self.watchers {
                assert_eq!(held(&watcher.blocks, &worker.id()), truth, "a watcher, {}", worker.id());
            }
        }
        let all = self
            .watchers
            .iter()
            .map(|watcher| &watcher.blocks)
            .chain([self.hub.blocks()]);
        all.for_each(|blocks| assert_eq!(blocks.index().holdings(), holdings, "nobody else"));
    }
}

const DETACHED: f64 = 6.0;

fn mangle<T>(sent: &mut VecDeque<T>, how: Mangle, copy: impl Fn(&T) -> Option<T>) {
    let Some(at) = sent.iter().position(|message| copy(message).is_some()) else {
        return;
    };
    match how {
        Mangle::Lost => {
            sent.remove(at);
        }
        Mangle::Doubled => sent.extend(copy(&sent[at])),
        Mangle::Overtaken => {
            if at + 1 < sent.len() && copy(&sent[at + 1]).is_some() {
                sent.swap(at, at + 1);
            }
        }
    }
}

fn any_step() -> impl Strategy<Value = Step> {
    let worker = || 0..WORKERS;
    let watcher = || 0..WATCHERS;
    let blocks = || prop::collection::vec(1_u64..40, 1..6);
    let how = || prop_oneof![Just(Mangle::Lost), Just(Mangle::Doubled), Just(Mangle::Overtaken)];
    prop_oneof![
        12 => (worker(), blocks()).prop_map(|(at, blocks)| Step::Stored(at, blocks)),
        6 => (worker(), blocks()).prop_map(|(at, blocks)| Step::Removed(at, blocks)),
        1 => worker().prop_map(Step::Cleared),
        16 => worker().prop_map(Step::Arrives),
        3 => (worker(), how()).prop_map(|(at, how)| Step::Mangled(at, how)),
        2 => worker().prop_map(Step::Breaks),
        1 => worker().prop_map(Step::Restarts),
        1 => Just(Step::HubRestarts),
        16 => watcher().prop_map(Step::Watches),
        3 => (watcher(), how()).prop_map(|(at, how)| Step::WatcherMangled(at, how)),
        2 => watcher().prop_map(Step::WatcherBreaks),
        1 => watcher().prop_map(Step::WatcherRestarts),
        2 => (0.0_f64..4.0).prop_map(Step::Time),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever happens on the way, at rest everybody knows what each worker holds, and of nobody else.
    #[test]
    fn all_is_known_at_rest(steps in prop::collection::vec(any_step(), 0..150)) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.step(step));
        world.come_to_rest();
        world.check();
    }
}

fn hello(instance: &str) -> Hello {
    Hello {
        worker_id: "w".into(),
        instance_id: instance.into(),
        pool: "p".into(),
        oldest_sequence: 1,
        next_sequence: 1,
    }
}

fn stored(sequence: u64, blocks: &[u64]) -> Event {
    let change = Change::Stored {
        parent: NO_BLOCK,
        blocks: blocks.to_vec(),
    };
    Event { sequence, change }
}

/// A hub with a worker that has said hello and holds these.
fn hub(blocks: &[u64]) -> Hub {
    let mut hub = Hub::new(Limits::default(), 1);
    assert_eq!(hub.hello(1, &hello("w-1"), &mut Vec::new()), Want::Snapshot);
    let snapshot = Snapshot {
        next_sequence: 1,
        chains: vec![(NO_BLOCK, blocks.to_vec())],
    };
    hub.snapshot(1, snapshot, &mut Vec::new());
    hub
}

#[test]
fn a_watcher_that_has_missed_little_goes_on_where_it_was() {
    let mut hub = hub(&[1, 2]);
    hub.watch(0.0, 9, Vec::new());
    assert_eq!(
        hub.news(9, 100)[0]
            .snapshot
            .as_ref()
            .map(|snapshot| snapshot.next_sequence),
        Some(1)
    );
    assert!(hub.news(9, 100).is_empty());
    hub.events(1, vec![stored(1, &[3])], &mut Vec::new());
    hub.unwatch(9);
    hub.watch(0.0, 10, vec![("w-1".into(), 1)]);
    let news = hub.news(10, 100);
    assert_eq!((&news[0].snapshot, &news[0].events), (&None, &vec![stored(1, &[3])]));
}

#[test]
fn a_watcher_that_reads_slowly_gets_a_snapshot_not_a_queue() {
    let mut hub = hub(&[]);
    hub.watch(0.0, 9, Vec::new());
    hub.news(9, 100);
    let mut woken = Vec::new();
    for sequence in 1..=2 * LOG_BLOCKS as u64 {
        hub.events(1, vec![stored(sequence, &[sequence])], &mut woken);
    }
    assert_eq!(woken, [9], "woken once");
    let news = hub.news(9, 100);
    assert!(news[0].events.is_empty() && news[0].snapshot.is_some());
}

#[test]
fn one_message_to_a_watcher_is_bounded() {
    let mut hub = Hub::new(Limits::default(), 1);
    for link in 0..50 {
        let mut hello = hello(&format!("w{link}-1"));
        hello.worker_id = format!("w{link}").into();
        hub.hello(link, &hello, &mut Vec::new());
        let snapshot = Snapshot {
            next_sequence: 1,
            chains: vec![(NO_BLOCK, (1..=100).collect())],
        };
        hub.snapshot(link, snapshot, &mut Vec::new());
    }
    hub.watch(0.0, 99, Vec::new());
    let mut messages = 0;
    let mut known = BTreeMap::new();
    loop {
        let news = hub.news(99, 1000);
        if news.is_empty() {
            break;
        }
        assert!(news.len() <= 10);
        messages += 1;
        news.into_iter()
            .for_each(|each| assert!(known.insert(each.instance_id.clone(), each).is_none()));
    }
    assert_eq!((known.len(), messages), (50, 6));
}

#[test]
fn who_is_away_is_kept_for_a_while_but_not_found() {
    let mut hub = hub(&[1, 2]);
    hub.watch(0.0, 9, Vec::new());
    hub.news(9, 100);
    hub.lost(10.0, 1);
    assert!(hub.find("p", &[1, 2]).is_empty());
    let mut woken = Vec::new();
    hub.expire(14.9, &mut woken);
    assert!(woken.is_empty() && hub.blocks().index().len() == 2);
    assert_eq!(hub.next_wakeup(), Some(15.0));
    hub.expire(15.0, &mut woken);
    assert_eq!(woken, [9]);
    assert!(hub.news(9, 100)[0].gone && hub.blocks().index().is_empty());
    assert_eq!(hub.next_wakeup(), None);
}

#[test]
fn a_new_instance_ends_the_one_before_it() {
    let mut hub = hub(&[1]);
    assert_eq!(hub.find("p", &[1]).len(), 1);
    assert!(hub.find("q", &[1]).is_empty());
    hub.hello(2, &hello("w-2"), &mut Vec::new());
    assert!(hub.find("p", &[1]).is_empty());
    // The late end of the old stream is no matter.
    hub.lost(0.0, 1);
    assert_eq!(hub.workers(), 1);
}

#[test]
fn an_instance_known_from_before_may_take_a_while_to_find_the_new_cache() {
    let mut hub = Hub::new(Limits::default(), 1);
    hub.watch(0.0, 9, vec![("w-1".into(), 7), ("x-1".into(), 3)]);
    assert!(hub.news(9, 100).is_empty());
    hub.hello(
        1,
        &Hello {
            next_sequence: 7,
            ..hello("w-1")
        },
        &mut Vec::new(),
    );
    hub.snapshot(
        1,
        Snapshot {
            next_sequence: 7,
            chains: Vec::new(),
        },
        &mut Vec::new(),
    );
    // It has missed nothing.
    assert!(hub.news(9, 100).is_empty());
    let mut woken = Vec::new();
    hub.expire(5.0, &mut woken);
    assert_eq!(woken, [9]);
    let news = hub.news(9, 100);
    assert!(news.len() == 1 && news[0].gone && &*news[0].instance_id == "x-1");
}

#[test]
fn a_number_in_use_outlives_the_news() {
    let mut blocks = Blocks::default();
    let (mine, other): (Arc<str>, Arc<str>) = ("w-1".into(), "x-1".into());
    let number = blocks.claim(&mine);
    blocks.begin_snapshot(&mine, 1);
    blocks.store("w-1", NO_BLOCK, &[1]);
    blocks.end_snapshot("w-1", 1);
    assert!(blocks.is_fed("w-1"));
    blocks.lose("w-1");
    assert!(!blocks.is_fed("w-1") && blocks.index().is_empty());
    assert_ne!(blocks.claim(&other), number);
    blocks.give_back("w-1");
    assert_eq!(blocks.number("w-1"), None);
    assert_eq!(blocks.claim(&"y-1".into()), number);
}
