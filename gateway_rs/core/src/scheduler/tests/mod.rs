//! Tests of the scheduler's core: a virtual clock that keeps the driver's duties, and a language of short commands.
//!
//! Everything that the core says is checked against its promises as it comes: each ask answered once, grants only to known
//! asks, limits kept, loads true. [`Bench::run`] takes one command:
//!
//! ```text
//! worker NAME [state= pool= instance= slots= context= kv_blocks= model= role= tag=]   joins and reports (state= : does not)
//! report NAME [state= slots= kv_blocks_used= waiting_prompt_tokens=]       lose NAME
//! router NAME                                                              router-lost NAME
//! ask N [router= pools= prompt= cls= left_s= n= avoid= max_tokens= expect= tenant= ttft= tpot= blocks= part= epoch=]
//! withdraw N [router=]    progress N [router= tokens=]    release N [router= prompt= tokens=]
//! +SECONDS                workers report meanwhile     +SECONDS silent
//! ```
#![allow(clippy::unwrap_used, clippy::panic)]

mod apart;
mod lending;
mod policy;
mod prefixes;
mod promises;
mod properties;
mod scenarios;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    actions::{Action, Grant, Refusal},
    events::{
        Ask, Books, Capabilities, Class, Description, Event, LeaseId, Link, Load, Outcome, Role, RunningLease,
        StepReport, WorkerHello, WorkerState,
    },
    Core, Policy,
};

/// What most tests start from: nothing is leased beyond the slots.
fn policy() -> Policy {
    Policy {
        queue_factor: 1.0,
        ..Policy::default()
    }
}

/// A core, its clock, and who is there.
struct Bench {
    core: Core,
    policy: Policy,
    now_s: f64,
    log: Vec<Action>,
    links: BTreeMap<String, Link>,
    instances: BTreeMap<String, Arc<str>>,
    /// Asks that are owed an answer.
    open: BTreeSet<(Link, u64)>,
    granted: BTreeMap<(Link, u64), Grant>,
    last_link: Link,
}

/// The words of a command: plain ones, and `key=value`.
struct Words<'a> {
    plain: Vec<&'a str>,
    options: BTreeMap<&'a str, &'a str>,
}

impl<'a> Words<'a> {
    fn new(words: impl Iterator<Item = &'a str>) -> Self {
        let (options, plain): (Vec<_>, Vec<_>) = words.partition(|word| word.contains('='));
        Self {
            plain,
            options: options.into_iter().map(|word| word.split_once('=').unwrap()).collect(),
        }
    }

    fn text(&self, key: &str, default: &'a str) -> &'a str {
        self.options.get(key).copied().unwrap_or(default)
    }

    fn number(&self, key: &str, default: u32) -> u32 {
        self.options.get(key).map_or(default, |value| value.parse().unwrap())
    }

    fn list(&self, key: &str, default: &'a str) -> Vec<&'a str> {
        self.text(key, default)
            .split(',')
            .filter(|word| !word.is_empty())
            .collect()
    }
}

impl Bench {
    fn new() -> Self {
        Self::with(policy())
    }

    fn with(policy: Policy) -> Self {
        let mut bench = Self::unsettled(policy, 1);
        bench.advance(bench.policy.silence_s());
        bench
    }

    /// A scheduler that has just started, and waits for pools to come back.
    fn unsettled(policy: Policy, seed: u64) -> Self {
        Self {
            core: Core::new(policy.clone(), seed, 0.0, 100),
            policy,
            now_s: 0.0,
            log: Vec::new(),
            links: BTreeMap::new(),
            instances: BTreeMap::new(),
            open: BTreeSet::new(),
            granted: BTreeMap::new(),
            last_link: 0,
        }
    }

    // Time.

    /// Lets time pass, waking the core when it asks for it.
    fn advance(&mut self, seconds: f64) -> Vec<Action> {
        let (until_s, mut done) = (self.now_s + seconds, Vec::new());
        let mut idle = 0;
        while let Some(wakeup_s) = self.core.next_wakeup().filter(|&wakeup_s| wakeup_s <= until_s) {
            idle = if wakeup_s > self.now_s { 0 } else { idle + 1 };
            assert!(idle < 3, "the core asks to be woken again and again");
            self.now_s = self.now_s.max(wakeup_s);
            done.extend(self.step(Event::Tick));
        }
        self.now_s = until_s;
        done
    }

    /// Time passes in which all workers report as they last did.
    fn live(&mut self, seconds: f64) -> Vec<Action> {
        let (until_s, mut done) = (self.now_s + seconds, Vec::new());
        while self.now_s < until_s {
            done.extend(self.advance(self.policy.heartbeat_s.min(until_s - self.now_s)));
            let loads: Vec<_> = self
                .core
                .fleet()
                .workers
                .values()
                .map(|each| (each.link, each.load.clone()))
                .collect();
            for (link, load) in loads {
                let load = Box::new(load);
                done.extend(self.step(Event::WorkerReported { link, load }));
            }
        }
        done
    }

    /// One event, now.
    fn step(&mut self, event: Event) -> Vec<Action> {
        let mut done = Vec::new();
        self.core.step(self.now_s, event, &mut done);
        for action in &done {
            self.note(action);
        }
        self.log.extend(done.iter().cloned());
        self.core.check();
        assert_eq!(
            self.core.queue().len(),
            self.open.len(),
            "who waits, and who is owed an answer"
        );
        done
    }

    fn note(&mut self, action: &Action) {
        match action {
            Action::Granted(grant) => {
                let key = (grant.link, grant.ask);
                assert!(self.open.remove(&key), "answered twice, or never asked: {action:?}");
                self.granted.insert(key, (**grant).clone());
            }
            Action::Refused(refusal) => {
                let key = (refusal.link, refusal.ask);
                assert!(self.open.remove(&key), "answered twice, or never asked: {action:?}");
            }
            Action::RouterDropped { link, .. } => self.open.retain(|key| key.0 != *link),
            _ => {}
        }
    }

    // Commands.

    fn run(&mut self, command: &str) -> Vec<Action> {
        let mut split = command.split_whitespace();
        let name = split.next().unwrap();
        let words = Words::new(split);
        let before = self.log.len();
        if let Some(seconds) = name.strip_prefix('+') {
            let seconds = seconds.parse().unwrap();
            if words.plain.is_empty() {
                self.live(seconds);
            } else {
                self.advance(seconds);
            }
        } else {
            let about = words.plain[0];
            match name {
                "worker" => self.worker(about, &words),
                "report" => self.report(about, &words),
                "lose" => {
                    let link = self.links[about];
                    self.step(Event::WorkerLost { link });
                }
                "router" => self.router(about, Vec::new()),
                "router-lost" => {
                    let link = self.links[about];
                    self.open.retain(|key| key.0 != link);
                    self.step(Event::RouterLost { link });
                }
                "ask" => self.ask(about.parse().unwrap(), &words),
                "withdraw" => {
                    let (link, ask) = (self.links[words.text("router", "r")], about.parse().unwrap());
                    self.open.remove(&(link, ask));
                    self.step(Event::Withdrawn { link, ask });
                }
                "progress" => {
                    let link = self.links[words.text("router", "r")];
                    let lease = self.granted[&(link, about.parse().unwrap())].lease;
                    let output_tokens = words.number("tokens", 1);
                    self.step(Event::Progressed {
                        link,
                        lease,
                        output_tokens,
                    });
                }
                "release" => {
                    let link = self.links[words.text("router", "r")];
                    let lease = self.granted[&(link, about.parse().unwrap())].lease;
                    let books = match words.number("tokens", 0) {
                        0 => Books::default(),
                        completion_tokens => Books {
                            outcome: Outcome::Stop,
                            prompt_tokens: words.number("prompt", 10),
                            completion_tokens,
                            ..Books::default()
                        },
                    };
                    self.step(Event::Released { link, lease, books });
                }
                _ => panic!("unknown command {command:?}"),
            }
        }
        self.log[before..].to_vec()
    }

    /// Several commands, one a line.
    fn run_all(&mut self, commands: &str) -> Vec<Action> {
        let lines = commands.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.flat_map(|line| self.run(line)).collect()
    }

    fn worker(&mut self, name: &str, words: &Words<'_>) {
        self.last_link += 1;
        let link = self.last_link;
        let instance = words.text("instance", "");
        let instance_id: Arc<str> = if instance.is_empty() {
            format!("{name}-{link}").into()
        } else {
            instance.into()
        };
        self.links.insert(name.to_owned(), link);
        self.instances.insert(name.to_owned(), instance_id.clone());
        let hello = WorkerHello {
            worker_id: name.into(),
            instance_id,
            pool: words.text("pool", "p").into(),
            address: format!("{name}:1").into(),
            description: Description {
                model: words.text("model", "m").into(),
                slots: words.number("slots", 1),
                context_tokens: words.number("context", 1000),
                kv_blocks: words.number("kv_blocks", 0),
                block_tokens: 16,
                capabilities: Capabilities {
                    kv_handoff: true,
                    ..Capabilities::default()
                },
                kv_state_tag: words.text("tag", "t").into(),
                ..Description::default()
            },
            startup_s: 1.0,
            role: match words.text("role", "") {
                "prefill" => Role::Prefill,
                "decode" => Role::Decode,
                _ => Role::Both,
            },
            kv_token_bytes: words.number("kv_token_bytes", 1024),
        };
        self.step(Event::WorkerJoined {
            link,
            hello: Box::new(hello),
        });
        let state = words.text("state", "ready");
        if !state.is_empty() {
            self.report(name, &Words::new([format!("state={state}").as_str()].into_iter()));
        }
    }

    fn report(&mut self, name: &str, words: &Words<'_>) {
        let load = Load {
            state: state(words.text("state", "ready")),
            slots: words.number("slots", 0),
            kv_blocks_used: words.number("kv_blocks_used", 0),
            waiting_prompt_tokens: words.number("waiting_prompt_tokens", 0).into(),
            ..Load::default()
        };
        let link = self.links[name];
        self.step(Event::WorkerReported {
            link,
            load: Box::new(load),
        });
    }

    /// The worker reports steps that take 5 ms, 1 ms for each decoding sequence and so much for each prompt token, until its
    /// predictions can be trusted.
    fn teach(&mut self, name: &str, token_ms: f64) {
        for round in 0..40_u32 {
            let step = |each: u32| {
                let (prefill_tokens, decode_tokens) = (((round * 7 + each) % 5) * 200, 1 + (round + 3 * each) % 8);
                let ms = 5.0 + f64::from(decode_tokens) + token_ms * f64::from(prefill_tokens);
                StepReport {
                    prefill_tokens,
                    prefill_pairs: 0.0,
                    decode_tokens,
                    context_tokens: 0,
                    duration_s: ms / 1e3,
                }
            };
            let load = Load {
                state: WorkerState::Ready,
                steps: (0..8).map(step).collect(),
                ..Load::default()
            };
            let link = self.links[name];
            self.step(Event::WorkerReported {
                link,
                load: Box::new(load),
            });
        }
        let worker = self.core.fleet().instance(&self.instances[name]).unwrap();
        assert!(self.core.fleet().kinds.trusted(worker.kind));
    }

    fn router(&mut self, name: &str, running: Vec<RunningLease>) {
        self.last_link += 1;
        let link = self.last_link;
        self.links.insert(name.to_owned(), link);
        self.step(Event::RouterJoined {
            bookings: Vec::new(),
            link,
            router_id: name.into(),
            running,
        });
    }

    fn ask(&mut self, number: u64, words: &Words<'_>) {
        let link = self.links[words.text("router", "r")];
        if self.open.insert((link, number)) {
            self.granted.remove(&(link, number));
        }
        let left_s = words.options.get("left_s").map(|value| value.parse::<f64>().unwrap());
        let avoid = words.list("avoid", "");
        let ask = Ask {
            number,
            request_id: format!("req-{number}").into(),
            pools: words.list("pools", "p").into_iter().map(Arc::from).collect(),
            prompt_tokens: words.number("prompt", 10),
            max_tokens: words.number("max_tokens", 16),
            choices: words.number("n", 1),
            class: class(words.text("cls", "standard")),
            arrived_s: words
                .options
                .get("spent")
                .map(|value| self.now_s - value.parse::<f64>().unwrap()),
            deadline_s: left_s.map(|left_s| self.now_s + left_s),
            avoid_instances: avoid
                .iter()
                .filter_map(|name| self.instances.get(*name))
                .cloned()
                .collect(),
            expected_output_tokens: words.number("expect", 0),
            may_part: words.number("part", 0) == 1,
            epoch: words.number("epoch", 1),
            tenant: words.text("tenant", "").into(),
            ttft_target_s: words.options.get("ttft").map(|value| value.parse().unwrap()),
            tpot_target_s: words.options.get("tpot").map(|value| value.parse().unwrap()),
            block_hashes: words
                .list("blocks", "")
                .iter()
                .map(|block| block.parse().unwrap())
                .collect(),
            ..Ask::default()
        };
        self.step(Event::Asked {
            link,
            ask: Box::new(ask),
        });
    }

    fn release_lease(&mut self, link: Link, lease: LeaseId) -> Vec<Action> {
        let books = Books::default();
        self.step(Event::Released { link, lease, books })
    }

    // Looking.

    /// Leases of a worker.
    fn load(&self, name: &str) -> usize {
        self.core
            .fleet()
            .instance(&self.instances[name])
            .map_or(0, |worker| worker.held.len())
    }

    /// What was granted to that ask of router r, if it was.
    fn grant(&self, number: u64) -> Option<&Grant> {
        self.granted.get(&(self.links["r"], number))
    }

    /// Who got that ask of router r.
    fn worker_of(&self, number: u64) -> &str {
        &self.grant(number).unwrap().worker_id
    }

    /// Whether that ask of router r runs.
    fn runs(&self, number: u64) -> bool {
        self.grant(number)
            .is_some_and(|grant| self.core.fleet().leases.contains_key(&grant.lease))
    }

    /// Names of workers that are in.
    fn joined(&self) -> Vec<&str> {
        let fleet = self.core.fleet();
        let here = self
            .instances
            .iter()
            .filter(|(_, instance)| fleet.instance(instance).is_some());
        here.map(|(name, _)| name.as_str()).collect()
    }
}

fn class(name: &str) -> Class {
    Class::ALL.into_iter().find(|class| class.name() == name).unwrap()
}

fn state(name: &str) -> WorkerState {
    WorkerState::ALL.into_iter().find(|state| state.name() == name).unwrap()
}

fn grants(actions: &[Action]) -> Vec<u64> {
    let of = |action: &Action| match action {
        Action::Granted(grant) => Some(grant.ask),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

fn refusals(actions: &[Action]) -> Vec<Refusal> {
    let of = |action: &Action| match action {
        Action::Refused(refusal) => Some((**refusal).clone()),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

/// The messages by which workers were dropped.
fn workers_dropped(actions: &[Action]) -> Vec<String> {
    let of = |action: &Action| match action {
        Action::WorkerDropped { message, .. } => Some(message.clone()),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

fn routers_dropped(actions: &[Action]) -> Vec<(Link, String)> {
    let of = |action: &Action| match action {
        Action::RouterDropped { link, message } => Some((*link, message.clone())),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}
