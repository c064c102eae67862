//! Whatever happens in whatever order, the scheduler keeps its promises.
//!
//! Random events under a virtual clock; the bench checks the promises after each step. At the end capacity comes back, and
//! then everything that waits must be served and every load must end at zero.

use proptest::prelude::*;

use super::*;
use crate::scheduler::{Disaggregation, PASS_LIMIT};

const ROUTERS: [&str; 2] = ["r", "s"];
/// Each worker serves one pool.
const WORKERS: [(&str, &str); 4] = [("A", "p"), ("B", "p"), ("C", "p"), ("D", "q")];
const POOLS: [&str; 5] = ["p", "q", "p,q", "q,p", "nowhere,p"];
const ROLES: [&str; 4] = ["both", "both", "prefill", "decode"];
const STATES: [&str; 6] = ["ready", "ready", "ready", "starting", "draining", "unhealthy"];

/// One random thing; numbers choose among what is there.
#[derive(Clone, Debug)]
enum Move {
    WorkerJoins {
        worker: usize,
        slots: u32,
        context: u32,
        kv_blocks: u32,
        role: usize,
    },
    WorkerReports {
        which: usize,
        state: usize,
        used: u32,
        waiting: u32,
        slots: u32,
    },
    WorkerLost {
        which: usize,
    },
    RouterJoins {
        router: usize,
        keep: u64,
        foreign: Vec<(LeaseId, usize)>,
    },
    RouterLost {
        which: usize,
    },
    Ask {
        which: usize,
        class: usize,
        pools: usize,
        prompt: u32,
        n: u32,
        left_s: Option<f64>,
        avoid: Vec<usize>,
    },
    Withdraw {
        which: usize,
    },
    PassOver {
        which: usize,
    },
    Release {
        which: usize,
        twice: bool,
    },
    Time {
        seconds: f64,
        reporting: bool,
    },
}

fn any_move() -> impl Strategy<Value = Move> {
    let which = 0..1000_usize;
    let one_of = |values: &'static [u32]| proptest::sample::select(values);
    prop_oneof![
        2 => (0..4_usize, 1..5_u32, one_of(&[50, 200]), one_of(&[0, 8, 20]), 0..ROLES.len())
            .prop_map(|(worker, slots, context, kv_blocks, role)| Move::WorkerJoins {
                worker, slots, context, kv_blocks, role
            }),
        3 => (which.clone(), 0..STATES.len(), 0..21_u32, 0..101_u32, 0..5_u32)
            .prop_map(|(which, state, used, waiting, slots)| Move::WorkerReports { which, state, used, waiting, slots }),
        1 => which.clone().prop_map(|which| Move::WorkerLost { which }),
        2 => (0..2_usize, any::<u64>(), prop::collection::vec((1..6_u64, which.clone()), 0..3))
            .prop_map(|(router, keep, foreign)| Move::RouterJoins { router, keep, foreign }),
        1 => which.clone().prop_map(|which| Move::RouterLost { which }),
        8 => (
            which.clone(), 0..3_usize, 0..POOLS.len(), 1..221_u32, one_of(&[1, 1, 1, 2, 5]),
            proptest::sample::select(vec![None, Some(0.0), Some(0.3), Some(5.0)]),
            prop::collection::vec(0..4_usize, 0..3),
        )
            .prop_map(|(which, class, pools, prompt, n, left_s, avoid)| Move::Ask {
                which, class, pools, prompt, n, left_s, avoid
            }),
        1 => which.clone().prop_map(|which| Move::Withdraw { which }),
        1 => which.clone().prop_map(|which| Move::PassOver { which }),
        4 => (which, any::<bool>()).prop_map(|(which, twice)| Move::Release { which, twice }),
        3 => (proptest::sample::select(vec![0.0, 0.1, 0.25, 1.0, 4.0]), any::<bool>())
            .prop_map(|(seconds, reporting)| Move::Time { seconds, reporting }),
    ]
}

fn pick<T: Copy>(from: &[T], which: usize) -> Option<T> {
    (!from.is_empty()).then(|| from[which % from.len()])
}

impl Bench {
    /// Routers that have a stream.
    fn here(&self) -> Vec<&'static str> {
        let routers = self.core.routers();
        ROUTERS
            .into_iter()
            .filter(|name| routers.get(*name).is_some_and(|router| router.link.is_some()))
            .collect()
    }

    /// (router's stream, lease) of all that is leased to routers that are here.
    fn held(&self) -> Vec<(Link, LeaseId)> {
        let routers = self.core.routers();
        let leases = |name| routers[name].leases.iter().map(move |&lease| (self.links[name], lease));
        self.here().into_iter().flat_map(leases).collect()
    }

    fn play(&mut self, number: u64, what: Move) {
        match what {
            Move::WorkerJoins {
                worker,
                slots,
                context,
                kv_blocks,
                role,
            } => {
                let ((name, pool), role) = (WORKERS[worker], ROLES[role]);
                self.run(&format!(
                    "worker {name} state= pool={pool} slots={slots} context={context} kv_blocks={kv_blocks} role={role}"
                ));
            }
            Move::WorkerReports {
                which,
                state,
                used,
                waiting,
                slots,
            } => {
                if let Some(name) = pick(&self.joined(), which) {
                    let state = STATES[state];
                    self.run(&format!(
                        "report {name} state={state} kv_blocks_used={used} waiting_prompt_tokens={waiting} slots={slots}"
                    ));
                }
            }
            Move::WorkerLost { which } => {
                if let Some(name) = pick(&self.joined(), which) {
                    self.run(&format!("lose {name}"));
                }
            }
            Move::RouterJoins { router, keep, foreign } => self.router_joins(ROUTERS[router], keep, &foreign),
            Move::RouterLost { which } => {
                if let Some(name) = pick(&self.here(), which) {
                    self.run(&format!("router-lost {name}"));
                }
            }
            Move::Ask {
                which,
                class,
                pools,
                prompt,
                n,
                left_s,
                avoid,
            } => {
                let Some(router) = pick(&self.here(), which) else {
                    return;
                };
                let (class, pools) = (Class::ALL[class].name(), POOLS[pools]);
                let avoid = avoid
                    .iter()
                    .map(|&worker| WORKERS[worker].0)
                    .collect::<Vec<_>>()
                    .join(",");
                let left = left_s.map(|left_s| format!("left_s={left_s}")).unwrap_or_default();
                self.run(&format!(
                    "ask {number} router={router} cls={class} pools={pools} prompt={prompt} n={n} avoid={avoid} part={} {left}",
                    number % 2
                ));
            }
            Move::Withdraw { which } => {
                let open: Vec<_> = self.open.iter().copied().collect();
                if let Some((link, ask)) = pick(&open, which) {
                    self.open.remove(&(link, ask));
                    self.step(Event::Withdrawn { link, ask });
                }
            }
            Move::PassOver { which } => {
                // As if many had been served past it, which would take hundreds of steps.
                if let Some(place) = pick(&self.core.queue().everything(), which) {
                    self.core.pass_over(place, PASS_LIMIT);
                }
            }
            Move::Release { which, twice } => {
                if let Some((link, lease)) = pick(&self.held(), which) {
                    self.release_lease(link, lease);
                    if twice {
                        self.release_lease(link, lease);
                    }
                }
            }
            Move::Time { seconds, reporting } => {
                self.run(&format!("+{seconds}{}", if reporting { "" } else { " silent" }));
            }
        }
    }

    /// A router (re)joins with some of its leases and some that are news to us.
    fn router_joins(&mut self, name: &str, keep: u64, foreign: &[(LeaseId, usize)]) {
        let fleet = self.core.fleet();
        let known = self
            .core
            .routers()
            .get(name)
            .map(|router| router.leases.clone())
            .unwrap_or_default();
        let kept = known
            .iter()
            .enumerate()
            .filter(|(index, _)| keep >> (index % 64) & 1 == 1);
        let announce = |lease: LeaseId, instance_id: Arc<str>| RunningLease {
            booking: 0,
            lease,
            instance_id,
            request_id: "".into(),
            tenant: "".into(),
            prompt_tokens: 3,
            max_tokens: 0,
        };
        let mut running: Vec<_> = kept
            .map(|(_, &id)| announce(id, fleet.leases[&id].instance_id.clone()))
            .collect();
        let mut instances: Vec<Arc<str>> = vec!["gone".into()];
        instances.extend(fleet.workers.values().map(|worker| worker.hello.instance_id.clone()));
        running.extend(
            foreign
                .iter()
                .map(|&(id, which)| announce(id, instances[which % instances.len()].clone())),
        );
        // The old stream, if there is one, is seen to break only later.
        if let Some(&link) = self.links.get(name) {
            self.open.retain(|key| key.0 != link);
        }
        self.router(name, running);
    }

    /// Capacity comes back: all that waits is served in the end, and nothing is left.
    fn settle(&mut self) {
        self.live(self.policy.silence_s() + self.policy.router_grace_s);
        for (name, pool) in WORKERS {
            if !self.joined().contains(&name) {
                self.run(&format!("worker {name} pool={pool} slots=2 context=200"));
            }
            self.run(&format!("report {name}"));
        }
        for _ in 0..300 {
            for (link, lease) in self.held() {
                self.release_lease(link, lease);
            }
            self.live(0.5);
            if self.core.queue().is_empty() {
                break;
            }
        }
        assert!(self.open.is_empty(), "still waiting: {:?}", self.open);
        for name in self.here() {
            self.run(&format!("router-lost {name}"));
        }
        self.live(self.policy.router_grace_s + 1.0);
        assert!(self.core.fleet().leases.is_empty() && self.core.routers().is_empty());
        self.core.check_empty();
    }
}

fn cases() -> u32 {
    std::env::var("HEADRACE_PROPTEST_CASES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn any_order_of_events(
        seed in any::<u64>(),
        settled in any::<bool>(),
        max_queued in proptest::sample::select(vec![0, 2, 30]),
        queue_factor in proptest::sample::select(vec![1.0, 1.5]),
        disaggregation in proptest::sample::select(vec![
            Disaggregation::Always, Disaggregation::Always, Disaggregation::Auto, Disaggregation::Off
        ]),
        moves in prop::collection::vec(any_move(), 1..60),
    ) {
        let policy = Policy {
            max_queued, queue_factor, disaggregation, disaggregation_min_tokens: 20, ..policy()
        };
        let mut bench = Bench::unsettled(policy, seed);
        if settled {
            bench.advance(bench.policy.silence_s());
        }
        for (number, what) in moves.into_iter().enumerate() {
            bench.play(number as u64, what);
        }
        bench.settle();
    }
}
