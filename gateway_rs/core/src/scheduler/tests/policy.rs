//! What the scheduler does with predictions, classes, targets and tenants.

use proptest::prelude::*;
use rand::{rngs::StdRng, Rng, SeedableRng};

use super::*;
use crate::scheduler::{actions::Reason, events::BlockChange, preemption::MAX_PREEMPTED, queue::AGING_S};

/// One worker whose prompt tokens take 1 ms each, and router r.
fn taught(options: &str) -> Bench {
    let mut bench = Bench::with(policy());
    bench.run("router r");
    bench.run(&format!("worker A context=100000 {options}"));
    bench.teach("A", 1.0);
    bench
}

fn preempted(actions: &[Action]) -> Vec<LeaseId> {
    let of = |action: &Action| match action {
        Action::Preempt { lease, .. } => Some(*lease),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

fn resumed(actions: &[Action]) -> Vec<LeaseId> {
    let of = |action: &Action| match action {
        Action::Resume { lease, .. } => Some(*lease),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

// Turns.

#[test]
fn a_prompt_waits_here_while_its_worker_computes_others() {
    let mut bench = taught("slots=8");
    bench.run_all("ask 1 prompt=1000\nask 2 prompt=500\nask 3 prompt=500");
    assert_eq!(grants(&bench.log), [1]);
    // The first has 0.1 s to go.
    assert!(grants(&bench.run("+0.85 silent")).is_empty());
    assert_eq!(grants(&bench.run("+0.1 silent")), [2]);
    // Its first token comes sooner than predicted.
    bench.run("progress 1");
    assert_eq!(grants(&bench.run("progress 2")), [3]);
}

#[test]
fn short_prompts_do_not_wait_for_each_other() {
    let mut bench = taught("slots=8");
    for number in 0..5 {
        bench.run(&format!("ask {number} prompt=20"));
    }
    assert_eq!(grants(&bench.log).len(), 5);
}

#[test]
fn who_is_due_first_is_served_first() {
    let mut bench = taught("slots=8");
    bench.run("ask 1 prompt=1000 cls=interactive ttft=2");
    bench.run_all("ask 2 prompt=500 ttft=50\nask 3 prompt=500 ttft=20\nask 4 prompt=500 left_s=10\nask 5 prompt=500 cls=interactive");
    // Nothing that is there comes before the last one, so there is no reason to hold it back.
    assert_eq!(grants(&bench.log), [1, 5]);
    let mut order = Vec::new();
    for _ in 0..3 {
        let done = bench.run("+2 silent");
        order.extend(grants(&done));
        for number in grants(&done) {
            bench.run(&format!("progress {number}"));
        }
    }
    assert_eq!(order, [4, 3, 2]);
}

#[test]
fn nothing_is_held_back_on_predictions_that_nobody_can_trust() {
    let mut bench = Bench::with(policy());
    bench.run_all("router r\nworker A slots=8 context=100000");
    for number in 0..8 {
        bench.run(&format!("ask {number} prompt=5000 ttft=0.1"));
    }
    assert_eq!(grants(&bench.log).len(), 8);
    assert!(refusals(&bench.log).is_empty());
}

// Shedding.

#[test]
fn what_would_be_late_is_refused_with_a_hint() {
    let mut bench = taught("slots=8");
    bench.run_all(
        "ask 1 prompt=1000 cls=interactive\nask 2 prompt=1000 ttft=1.5\nask 3 prompt=1000 cls=batch ttft=1.5\nask 4 prompt=1000",
    );
    let done = bench.run("+3 silent");
    let refused = refusals(&done);
    assert_eq!(
        (refused.len(), refused[0].ask, refused[0].reason),
        (1, 2, Reason::Overloaded)
    );
    assert!(refused[0].retryable && refused[0].retry_after_ms > 0);
    // By the target of its class alone nothing is shed, and batch work waits.
    let mut bench_later = grants(&done);
    bench.run("progress 4");
    bench_later.extend(grants(&bench.run("+3 silent")));
    assert_eq!(bench_later, [4, 3]);
    assert_eq!(bench.core.measures().shed, 1);
}

#[test]
fn what_will_be_late_is_refused_when_that_is_certain() {
    let mut bench = taught("slots=8");
    // A second each; the second is due in 3 s, and would have its turn after 4 s.
    bench.run("ask 1 prompt=4000 cls=interactive");
    bench.run("ask 2 prompt=1000 ttft=3");
    assert!(refusals(&bench.run("+1.75 silent")).is_empty());
    let refused = refusals(&bench.run("+0.1 silent"));
    assert_eq!(
        (refused.len(), refused[0].ask),
        (1, 2),
        "3 s less 1.2 of what its prompt takes"
    );
    // Nothing of it is counted at the worker any more.
    assert_eq!(bench.core.fleet().workers[&bench.links["A"]].prompts.planned(), 0);
}

#[test]
fn a_target_counts_from_the_arrival_at_the_router() {
    let mut bench = taught("slots=8");
    bench.run("ask 1 prompt=4000 cls=interactive");
    bench.run("ask 2 prompt=1000 ttft=3 spent=1");
    assert!(refusals(&bench.run("+0.75 silent")).is_empty());
    assert_eq!(refusals(&bench.run("+0.1 silent")).len(), 1);
    // Who came first is due first, whichever asked first.
    bench.run("ask 3 prompt=900");
    bench.run("ask 4 prompt=900 spent=2");
    assert_eq!(grants(&bench.run("progress 1")).first(), Some(&4));
}

#[test]
fn what_an_idle_worker_could_not_do_in_time_is_refused_at_once() {
    let mut bench = taught("slots=8");
    let refused = refusals(&bench.run("ask 1 prompt=5000 left_s=1"));
    assert_eq!(
        (refused[0].reason, refused[0].retryable),
        (Reason::DeadlineExceeded, false)
    );
    assert!(refusals(&bench.run("ask 2 prompt=5000 left_s=6")).is_empty());
}

// Preemption.

#[test]
fn batch_work_gives_way_and_goes_on() {
    let mut bench = taught("slots=2");
    bench.run_all(
        "ask 1 cls=batch max_tokens=500\nask 2 cls=batch max_tokens=500\nprogress 1 tokens=20\nprogress 2 tokens=1",
    );
    bench.run("ask 3 cls=batch");
    let done = bench.run("ask 4 cls=interactive");
    // The one that has cost least.
    assert_eq!(preempted(&done), [bench.grant(2).unwrap().lease]);
    assert_eq!(grants(&done), [4]);
    assert_eq!(
        bench
            .core
            .fleet()
            .instance(&bench.instances["A"])
            .unwrap()
            .held
            .choices(),
        2
    );
    // While a standard one waits, it stays aside.
    bench.run("ask 5 cls=standard");
    assert_eq!(grants(&bench.run("release 4")), [5]);
    let done = bench.run("release 5");
    assert_eq!(resumed(&done), [bench.grant(2).unwrap().lease]);
    assert!(grants(&done).is_empty(), "the batch request that waits comes after");
    bench.run_all("progress 2 tokens=30\nrelease 2\nrelease 1");
    assert_eq!(bench.load("A"), 1);
}

#[test]
fn who_is_nearly_done_goes_last_and_who_was_put_aside_often_stays() {
    let mut bench = taught("slots=2");
    bench.run_all("ask 1 cls=batch prompt=10 max_tokens=100\nprogress 1 tokens=90");
    bench.run_all("ask 2 cls=batch prompt=900 max_tokens=100\nprogress 2 tokens=5");
    for (number, gives_way) in [(3, 2), (4, 1)] {
        let done = bench.run(&format!("ask {number} cls=interactive"));
        assert_eq!(preempted(&done), [bench.grant(gives_way).unwrap().lease]);
    }
    let mut bench = taught("slots=1");
    bench.run_all("ask 3 cls=batch max_tokens=1000\nprogress 3 tokens=5");
    let mut times = 0;
    for number in 10..20 {
        times += preempted(&bench.run(&format!("ask {number} cls=interactive"))).len();
        if bench.grant(number).is_some() {
            bench.run(&format!("release {number}"));
        } else {
            bench.run(&format!("withdraw {number}"));
        }
        bench.run("progress 3 tokens=7");
    }
    assert_eq!(times, MAX_PREEMPTED as usize);
    assert!(bench.runs(3));
}

/// After a minute all of a backlog has waited for a minute.
#[test]
fn of_a_backlog_that_has_aged_a_few_at_once_give_way_to_nobody() {
    let mut bench = taught("slots=4");
    for number in 1..=12 {
        bench.run(&format!("ask {number} cls=batch max_tokens=1000"));
    }
    for number in 1..=4 {
        bench.run(&format!("progress {number} tokens=5"));
    }
    bench.run(&format!("+{}", 2.0 * AGING_S + 1.0));
    for (done, next) in [(1, 5), (2, 6), (3, 7), (4, 8)] {
        assert_eq!(grants(&bench.run(&format!("release {done}"))), [next]);
        bench.run(&format!("progress {next} tokens=5"));
    }
    let stays = |bench: &Bench, number| bench.core.fleet().leases[&bench.grant(number).unwrap().lease].stays;
    assert!(stays(&bench, 5));
    assert!((6..=8).all(|number| !stays(&bench, number)));
    for number in 20..23 {
        let done = bench.run(&format!("ask {number} cls=interactive"));
        assert_eq!(grants(&done), [number]);
        assert_ne!(preempted(&done), [bench.grant(5).unwrap().lease]);
    }
    assert!(grants(&bench.run("ask 23 cls=interactive")).is_empty());
    // When it is done, what has waited longest may.
    bench.run_all("withdraw 23\nrelease 20\nrelease 21\nrelease 22\nrelease 5");
    assert!(bench.grant(9).is_some());
    assert_eq!(grants(&bench.run("release 6")), [10]);
    assert!(stays(&bench, 10));
}

#[test]
fn who_waits_at_the_worker_gives_way_before_who_decodes() {
    let mut bench = taught("slots=2");
    bench.run_all("ask 1 cls=batch max_tokens=500 prompt=10\nprogress 1 tokens=1\nask 2 cls=batch prompt=4000");
    // What no report has told of may not have come to the worker yet.
    assert_eq!(
        preempted(&bench.run("ask 3 cls=interactive")),
        [bench.grant(1).unwrap().lease]
    );
    assert_eq!(resumed(&bench.run("release 3")), [bench.grant(1).unwrap().lease]);
    bench.run_all("progress 1 tokens=2\n+1 silent\nreport A waiting_prompt_tokens=4000");
    let waits = bench.grant(2).unwrap().lease;
    let began_s = bench.now_s;
    let mut times = 0;
    for number in 10.. {
        let done = bench.run(&format!("ask {number} cls=interactive"));
        let gave_way = preempted(&done);
        if gave_way != [waits] {
            break;
        }
        times += 1;
        assert_eq!(grants(&done), [number]);
        assert_eq!(resumed(&bench.run(&format!("release {number}"))), [waits]);
        bench.run_all("+1 silent\nreport A waiting_prompt_tokens=4000");
    }
    // It has said nothing that would be lost, so it is not counted, but neither does it wait for ever.
    let waited_s = bench.now_s - began_s;
    assert!(times > 10 && waited_s <= 2.0 * AGING_S, "{times} times in {waited_s} s");
}

#[test]
fn interactive_requests_do_not_queue_for_each_other_while_batch_work_has_slots() {
    let mut bench = Bench::with(Policy {
        queue_factor: 2.0,
        ..policy()
    });
    bench.run("router r");
    for (worker, class, numbers) in [("A", "interactive", 1..5), ("B", "batch", 11..15)] {
        bench.run(&format!("worker {worker} context=100000 slots=4"));
        bench.teach(worker, 1.0);
        for number in numbers {
            bench.run_all(&format!(
                "ask {number} cls={class} max_tokens=500\nprogress {number} tokens=1"
            ));
            assert_eq!(bench.worker_of(number), worker);
        }
    }
    // As many decode there as here, but those there give way.
    for number in 21..25 {
        bench.run_all(&format!("ask {number} cls=interactive\nprogress {number} tokens=1"));
        assert_eq!(bench.worker_of(number), "B");
    }
    bench.run("ask 30 cls=interactive");
    assert_eq!(bench.worker_of(30), "A", "nobody there gives way any more");
}

#[test]
fn what_was_put_aside_ends_with_its_worker_and_its_router() {
    for end in ["lose A", "router-lost r"] {
        let mut bench = taught("slots=1");
        bench.run_all("ask 1 cls=batch max_tokens=500\nprogress 1\nask 2 cls=interactive");
        assert_eq!(bench.core.measures().preempted, 1);
        bench.run(end);
        bench.live(bench.policy.router_grace_s + 1.0);
        assert!(bench.core.fleet().leases.is_empty(), "{end}");
    }
}

// Chunks.

#[test]
fn the_chunk_keeps_the_step_within_the_target() {
    let mut bench = taught("slots=64");
    bench.run_all("ask 1 tpot=0.2\nprogress 1");
    let chunk = |actions: &[Action]| {
        let of = |action: &Action| match action {
            Action::SetLimits { limits, .. } => Some((limits.chunk_tokens, limits.batch_chunk_tokens)),
            _ => None,
        };
        actions.iter().filter_map(of).next_back()
    };
    // 0.9 times 200 ms, less 5 ms for the step and 1 ms for the one that decodes.
    let (told, batch) = chunk(&bench.run("report A")).unwrap();
    assert!((165..=180).contains(&told), "{told}");
    // A quarter of the 6 ms that the step takes has room for one token of batch prompts: they have their floor.
    assert_eq!(batch, 4);
    assert_eq!(chunk(&bench.run("report A")), None, "once");
    bench.run_all("ask 2 tpot=0.01\nprogress 2");
    assert_eq!(chunk(&bench.run("report A")), Some((128, 4)), "the floors");
    for number in 3..=42 {
        bench.run_all(&format!("ask {number} tpot=0.2\nprogress {number}"));
    }
    bench.run("release 2");
    let (told, batch) = chunk(&bench.run("report A")).unwrap();
    assert!((125..=140).contains(&told), "{told}");
    // 41 decode in 46 ms.
    assert!((10..=12).contains(&batch), "{batch}");
}

#[test]
fn batch_sequences_slow_others_down_by_a_quarter_at_most() {
    let mut bench = taught("slots=32");
    let told = |actions: &[Action]| {
        let of = |action: &Action| match action {
            Action::SetLimits { limits, .. } => Some(limits.batch_sequences),
            _ => None,
        };
        actions.iter().filter_map(of).next_back()
    };
    for number in 1..=12 {
        bench.run_all(&format!(
            "ask {number} cls=batch max_tokens=500\nprogress {number} tokens=1"
        ));
    }
    // A step takes 5 ms and 1 ms for each sequence: beside one other, 1.5 are a quarter.
    assert_eq!(told(&bench.run("report A")), Some(1));
    for number in 21..=36 {
        bench.run_all(&format!("ask {number} cls=interactive\nprogress {number} tokens=1"));
    }
    // Beside 16, 5 are.
    assert_eq!(told(&bench.run("report A")), Some(5));
    for number in 22..=36 {
        bench.run(&format!("release {number}"));
    }
    assert_eq!(told(&bench.run("report A")), Some(1));
}

// Placement.

#[test]
fn a_prompt_goes_where_its_beginning_is() {
    let mut bench = Bench::with(policy());
    bench.run("router r");
    for name in ["A", "B", "C"] {
        bench.run(&format!("worker {name} slots=8 context=100000"));
        bench.teach(name, 1.0);
    }
    let blocks = (1..=100).map(|block| block.to_string()).collect::<Vec<_>>().join(",");
    bench.run(&format!("ask 1 prompt=1600 blocks={blocks}"));
    let holder = bench.worker_of(1).to_owned();
    bench.run_all("progress 1\nrelease 1");
    for number in 2..20 {
        bench.run(&format!("ask {number} prompt=1620 blocks={blocks}"));
        assert_eq!(bench.worker_of(number), holder);
        assert_eq!(bench.grant(number).unwrap().cached_tokens, 1600);
        bench.run_all(&format!("progress {number}\nrelease {number}"));
    }
    // What a worker says itself is believed instead.
    let link = bench.links[&holder];
    bench.step(Event::BlocksChanged {
        link,
        change: BlockChange::Cleared,
    });
    bench.run(&format!("ask 30 prompt=1620 blocks={blocks}"));
    assert_eq!(bench.grant(30).unwrap().cached_tokens, 0);
}

#[test]
fn a_search_does_not_grow_with_the_fleet() {
    let looked_at = |workers: u32| {
        let mut core = Core::new(policy(), 1, 0.0, 1);
        let mut actions = Vec::new();
        for link in 1..=u64::from(workers) {
            let name: Arc<str> = format!("w{link}").into();
            let hello = WorkerHello {
                worker_id: name.clone(),
                instance_id: name.clone(),
                pool: "p".into(),
                address: name,
                description: Description {
                    slots: 64,
                    block_tokens: 16,
                    ..Description::default()
                },
                ..WorkerHello::default()
            };
            core.step(
                0.0,
                Event::WorkerJoined {
                    link,
                    hello: Box::new(hello),
                },
                &mut actions,
            );
            let load = Box::new(Load {
                state: WorkerState::Ready,
                ..Load::default()
            });
            core.step(0.0, Event::WorkerReported { link, load }, &mut actions);
        }
        let link = 1_000_000;
        let (router_id, running) = ("r".into(), Vec::new());
        core.step(
            0.0,
            Event::RouterJoined {
                bookings: Vec::new(),
                link,
                router_id,
                running,
            },
            &mut actions,
        );
        let mut leases = std::collections::VecDeque::new();
        let count = 20 * u64::from(workers).max(50);
        for number in 0..count {
            let ask = Box::new(Ask {
                number,
                pools: vec!["p".into()],
                prompt_tokens: 100 + number as u32 % 50,
                // One beginning in two is one of a few.
                block_hashes: if number % 2 == 0 {
                    vec![number % 6, 100 + number % 6]
                } else {
                    Vec::new()
                },
                ..Ask::default()
            });
            actions.clear();
            core.step(0.0, Event::Asked { link, ask }, &mut actions);
            let [Action::Granted(grant)] = &actions[..] else {
                panic!("{actions:?}");
            };
            leases.push_back(grant.lease);
            if leases.len() > workers as usize * 4 {
                let lease = leases.pop_front().unwrap();
                let books = Books::default();
                core.step(0.0, Event::Released { link, lease, books }, &mut actions);
            }
        }
        core.fleet().looked_at as f64 / count as f64
    };
    let (small, large) = (looked_at(10), looked_at(1000));
    assert!(large < 80.0, "{small} workers looked at of 10, {large} of 1,000");
}

/// Batch work gives way: who queues behind another's prompt to be where there is less of it waits for nothing.
#[test]
fn interactive_prompts_do_not_queue_for_each_other_beside_batch_work() {
    let mut bench = Bench::with(Policy {
        dispatch_ahead_s: 1e9,
        ..policy()
    });
    bench.run_all("router r\nworker A slots=64 context=100000\nworker B slots=64 context=100000");
    bench.teach("A", 1.0);
    bench.teach("B", 1.0);
    let at = |bench: &Bench, number| bench.grant(number).unwrap().worker_id.to_string();
    bench.run("ask 1 prompt=300 cls=interactive");
    let first = at(&bench, 1);
    // All of it goes to the other one, which has much more to do then.
    for number in 10..14 {
        bench.run(&format!("ask {number} prompt=40 cls=batch"));
        assert_ne!(at(&bench, number), first);
    }
    bench.run("ask 2 prompt=300 cls=interactive");
    assert_ne!(at(&bench, 2), first);
    assert_eq!(bench.grant(2).unwrap().why.gives_way, 4);
    // Where there is less of it, among equals.
    bench.run_all("release 1\nrelease 2\nask 3 prompt=300 cls=standard");
    assert_eq!(at(&bench, 3), first);
}

#[test]
fn a_slow_worker_gets_less() {
    let mut bench = Bench::with(policy());
    bench.run_all("router r\nworker A slots=64 context=100000\nworker B slots=64 context=100000");
    for _ in 0..20 {
        bench.teach("A", 1.0);
        bench.teach("B", 2.0);
    }
    for number in 0..40 {
        bench.run(&format!("ask {number} prompt=20"));
        bench.run("+0.02 silent");
    }
    assert!(
        bench.load("A") > bench.load("B") + 4,
        "{} {}",
        bench.load("A"),
        bench.load("B")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The search finds what looking at everybody finds.
    #[test]
    fn the_best_worker_is_found_without_looking_at_all(seed in any::<u64>()) {
        let mut rng = StdRng::seed_from_u64(seed);
        let policy = Policy { dispatch_ahead_s: 1e9, shed: false, preempt: false, heartbeats_missed: 100_000, ..policy() };
        let mut bench = Bench::with(policy);
        bench.run("router r");
        let workers = rng.random_range(2..12);
        for worker in 0..workers {
            let slots = rng.random_range(1..20);
            bench.run(&format!("worker w{worker} slots={slots} context=100000"));
        }
        bench.teach("w0", 1.0);
        let mut open = Vec::new();
        for number in 0..60 {
            // Prompts of a few families share beginnings.
            let (family, depth) = (rng.random_range(0..4_u64), rng.random_range(0..30_u64));
            let blocks: Vec<u64> = (1..=depth).map(|block| family * 1000 + block).collect();
            let prompt = depth as u32 * 16 + rng.random_range(1..400);
            // What is no batch work does not see it.
            let (class, cls) = [(Class::Batch, "batch"), (Class::Standard, "standard"), (Class::Interactive, "interactive")]
                [rng.random_range(0..3)];
            let ask = Ask { prompt_tokens: prompt, block_hashes: blocks.clone(), class, ..Ask::default() };
            let expected = bench.core.brute_force(bench.now_s, "p", &ask);
            let blocks = blocks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            let now_s = bench.now_s;
            bench.run(&format!("ask {number} prompt={prompt} blocks={blocks} cls={cls}"));
            match (bench.grant(number).cloned(), expected) {
                (Some(grant), Some(scores)) => {
                    let least = scores.values().copied().fold(f64::INFINITY, f64::min);
                    let got = scores[&grant.worker];
                    prop_assert!(got <= least + 1e-6 * least.abs(), "seed {seed}, {now_s}: {got} but {least}");
                    open.push(number);
                }
                (None, None) => {}
                (grant, scores) => prop_assert!(false, "{grant:?} {scores:?}"),
            }
            if rng.random_bool(0.3) && !open.is_empty() {
                let which = open[rng.random_range(0..open.len())];
                bench.run(&format!("progress {which}"));
            }
            if rng.random_bool(0.2) && !open.is_empty() {
                let which = open.swap_remove(rng.random_range(0..open.len()));
                bench.run(&format!("release {which}"));
            }
            let seconds = rng.random_range(0.0..0.2);
            bench.run(&format!("+{seconds} silent"));
            if rng.random_bool(0.1) {
                let which = rng.random_range(0..workers);
                let tokens = rng.random_range(0..500);
                bench.run(&format!("report w{which} waiting_prompt_tokens={tokens}"));
            }
        }
    }
}

// A worker that takes its time.

/// Asks are run as they are granted: a token takes 1 ms of prompt and 10 ms of answer, and who is put aside stands still.
struct Mill {
    bench: Bench,
    /// Ends of what runs: (when, number, has its first token).
    running: BTreeMap<u64, (f64, bool)>,
    tokens: BTreeMap<u64, (u32, u32)>,
    aside: BTreeSet<u64>,
    ended: BTreeMap<u64, f64>,
    refused: BTreeMap<u64, Reason>,
    busy_until_s: BTreeMap<Arc<str>, f64>,
    granted_s: BTreeMap<u64, f64>,
    /// Tokens computed for each tenant.
    had: BTreeMap<String, f64>,
    tenants: BTreeMap<u64, String>,
}

impl Mill {
    fn new(policy: Policy, workers: u32, slots: u32) -> Self {
        let mut bench = Bench::with(policy);
        bench.run("router r");
        for worker in 0..workers {
            bench.run(&format!("worker w{worker} slots={slots} context=100000"));
            bench.teach(&format!("w{worker}"), 1.0);
        }
        Self {
            bench,
            running: BTreeMap::new(),
            tokens: BTreeMap::new(),
            aside: BTreeSet::new(),
            ended: BTreeMap::new(),
            refused: BTreeMap::new(),
            busy_until_s: BTreeMap::new(),
            granted_s: BTreeMap::new(),
            had: BTreeMap::new(),
            tenants: BTreeMap::new(),
        }
    }

    fn ask(&mut self, number: u64, prompt: u32, output: u32, tenant: &str, options: &str) {
        self.tokens.insert(number, (prompt, output));
        self.tenants.insert(number, tenant.to_owned());
        let done = self
            .bench
            .run(&format!("ask {number} prompt={prompt} tenant={tenant} {options}"));
        self.take(&done);
    }

    fn take(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Granted(grant) => self.start(grant.ask, &grant.instance_id.clone()),
                Action::Refused(refusal) => {
                    assert!(
                        self.refused.insert(refusal.ask, refusal.reason).is_none(),
                        "refused twice"
                    );
                }
                Action::Preempt { lease, .. } => {
                    let number = self.number_of(*lease);
                    self.running.remove(&number);
                    self.aside.insert(number);
                }
                Action::Resume { lease, .. } => {
                    let number = self.number_of(*lease);
                    self.aside.remove(&number);
                    let instance = self.bench.grant(number).unwrap().instance_id.clone();
                    self.start(number, &instance);
                }
                _ => {}
            }
        }
    }

    fn number_of(&self, lease: LeaseId) -> u64 {
        self.bench
            .granted
            .iter()
            .find(|(_, grant)| grant.lease == lease)
            .unwrap()
            .0
             .1
    }

    fn start(&mut self, number: u64, instance: &Arc<str>) {
        let now_s = self.bench.now_s;
        self.granted_s.entry(number).or_insert(now_s);
        let (prompt, output) = self.tokens[&number];
        *self.had.entry(self.tenants[&number].clone()).or_default() += f64::from(prompt) + 2.0 * f64::from(output);
        let busy = self.busy_until_s.entry(instance.clone()).or_default();
        *busy = busy.max(now_s) + f64::from(prompt) / 1e3;
        self.running.insert(number, (*busy, false));
    }

    /// Time passes until then.
    fn until(&mut self, until_s: f64) {
        let mut reported_s = self.bench.now_s;
        loop {
            let next = self
                .running
                .iter()
                .min_by(|a, b| a.1 .0.total_cmp(&b.1 .0))
                .map(|(&number, &at)| (at, number));
            let next_s = next
                .map_or(until_s, |((at_s, _), _)| at_s)
                .min(until_s)
                .min(reported_s + 0.25);
            let done = self.bench.advance((next_s - self.bench.now_s).max(0.0));
            self.take(&done);
            if self.bench.now_s >= reported_s + 0.25 {
                reported_s = self.bench.now_s;
                let names: Vec<_> = self.bench.joined().into_iter().map(str::to_owned).collect();
                for name in names {
                    let done = self.bench.run(&format!("report {name}"));
                    self.take(&done);
                }
            }
            match next.filter(|((at_s, _), number)| *at_s <= self.bench.now_s && self.running.contains_key(number)) {
                Some(((_, false), number)) => {
                    let output = self.tokens[&number].1;
                    self.running
                        .insert(number, (self.bench.now_s + f64::from(output) / 100.0, true));
                    let done = self.bench.run(&format!("progress {number}"));
                    self.take(&done);
                }
                Some(((_, true), number)) => {
                    self.running.remove(&number);
                    self.ended.insert(number, self.bench.now_s);
                    let (prompt, tokens) = self.tokens[&number];
                    let done = self
                        .bench
                        .run(&format!("release {number} tokens={tokens} prompt={prompt}"));
                    self.take(&done);
                }
                None if self.bench.now_s >= until_s => return,
                None => {}
            }
        }
    }
}

#[test]
fn tenants_that_flood_do_not_displace_others() {
    for (weights, share) in [(BTreeMap::new(), 1.0), (BTreeMap::from([("big".to_owned(), 3.0)]), 3.0)] {
        let quantum = 2000.0;
        let mut mill = Mill::new(
            Policy {
                fair_quantum_tokens: quantum,
                tenant_weights: weights,
                ..policy()
            },
            1,
            4,
        );
        // One asks for much at once, the other for the same in small pieces.
        let mut number = 0;
        for _ in 0..60 {
            number += 1;
            mill.ask(number, 800, 100, "big", "expect=100");
        }
        for _ in 0..250 {
            number += 1;
            mill.ask(number, 100, 50, "small", "expect=50");
        }
        mill.until(mill.bench.now_s + 25.0);
        let (big, small) = (mill.had["big"], mill.had["small"]);
        assert!(mill.bench.core.queue().len() > 100, "both still wait");
        // 2 max(w_p L_in, w_q M) of VTC, with M the tokens of a full batch: 4 requests of 900.
        let bound = 2.0 * f64::max(800.0, 2.0 * 4.0 * 900.0);
        assert!((big / share - small).abs() <= bound, "{big} {small}");
        assert!(big > 5_000.0 && small > 5_000.0, "{big} {small}");
    }
}

#[test]
fn batch_work_is_served_under_endless_interactive_load() {
    // However much is sent ahead: what is held back is put in order, and what is sent is computed in order.
    for dispatch_ahead_s in [0.1, 2.0, 1e9] {
        endless_interactive_load(dispatch_ahead_s);
    }
}

fn endless_interactive_load(dispatch_ahead_s: f64) {
    let policy = Policy {
        dispatch_ahead_s,
        ..policy()
    };
    let mut mill = Mill::new(policy, 1, 4);
    mill.ask(1, 100, 50, "t", "cls=batch");
    for number in 2..8 {
        mill.ask(number, 400, 50, "t", "cls=batch max_tokens=50");
    }
    let mut number = 10;
    let began_s = mill.bench.now_s;
    while mill.bench.now_s < began_s + 4.0 * AGING_S {
        number += 1;
        // Twice what the worker can do.
        mill.ask(number, 600, 20, "t", "cls=interactive ttft=2");
        mill.until(mill.bench.now_s + 0.3);
    }
    for batch in 1..8 {
        let ended_s = mill.ended.get(&batch);
        assert!(
            ended_s.is_some(),
            "{dispatch_ahead_s} {batch}: {:?} {:?}",
            mill.granted_s.get(&batch),
            mill.bench.core.measures()
        );
    }
    assert!(mill.bench.core.measures().shed > 50);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever is asked for: every ask that was taken in ends, or is refused by its own deadline or target.
    #[test]
    fn nobody_starves(seed in any::<u64>(), workers in 1_u32..4, slots in 1_u32..5) {
        let mut rng = StdRng::seed_from_u64(seed);
        let share = if rng.random_bool(0.3) { 0.8 } else { 0.0 };
        let ahead = [0.0, 0.1, 2.0, 1e9][rng.random_range(0..4)];
        let policy = Policy { prefill_share: share, dispatch_ahead_s: ahead, ..policy() };
        let mut mill = Mill::new(policy, workers, slots);
        let count = 60;
        let mut limited = BTreeSet::new();
        for number in 0..count {
            let (prompt, output) = (rng.random_range(1..1500), rng.random_range(1..200));
            let class = Class::ALL[rng.random_range(0..3)].name();
            let tenant = ["a", "b", "c"][rng.random_range(0..3)];
            let mut options = format!("cls={class} max_tokens={output}");
            if rng.random_bool(0.2) {
                options += &format!(" left_s={:.2}", rng.random_range(0.1..20.0));
                limited.insert(number);
            }
            if rng.random_bool(0.2) {
                options += &format!(" ttft={:.2}", rng.random_range(0.1..5.0));
                limited.insert(number);
            }
            mill.ask(number, prompt, output, tenant, &options);
            let seconds = rng.random_range(0.0..0.6);
            mill.until(mill.bench.now_s + seconds);
        }
        mill.until(mill.bench.now_s + 600.0);
        for number in 0..count {
            // It ends, or is refused because of what it asked for itself, and never both.
            let (ended, refused) = (mill.ended.contains_key(&number), mill.refused.get(&number));
            let told = format!("seed {seed}: {number} {:?} {refused:?}", mill.tokens[&number]);
            prop_assert!(ended != refused.is_some(), "{told}");
            prop_assert!(refused.is_none() || limited.contains(&number), "{told}");
        }
        prop_assert!(mill.bench.core.queue().is_empty() && mill.bench.core.fleet().leases.is_empty());
        prop_assert!(mill.aside.is_empty(), "seed {seed}: put aside for ever");
    }
}
