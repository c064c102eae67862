//! The scheduler's promises under particular circumstances: placement, load, reconnection, time.

use super::*;
use crate::scheduler::{actions::Reason, PASS_LIMIT};

fn workers(bench: &mut Bench, names: &[&str], options: &str) {
    for name in names {
        bench.run(&format!("worker {name} {options}"));
    }
}

fn ask(bench: &mut Bench, number: u64, options: &str) -> Vec<Action> {
    bench.run(&format!("ask {number} {options}"))
}

fn release(bench: &mut Bench, number: u64) -> Vec<Action> {
    bench.run(&format!("release {number}"))
}

/// A bench with router r.
fn with_router(policy: Policy) -> Bench {
    let mut bench = Bench::with(policy);
    bench.run("router r");
    bench
}

fn bench() -> Bench {
    with_router(policy())
}

fn place_in_queue(bench: &Bench, number: u64) -> u64 {
    bench.core.queue().find(bench.links["r"], number).unwrap()
}

// Placement.

#[test]
fn ties_are_drawn_by_lot() {
    for seed in 0..5 {
        let mut bench = Bench::unsettled(policy(), seed);
        bench.run("router r");
        workers(&mut bench, &["A", "B", "C"], "slots=4");
        let mut placed = BTreeMap::new();
        for number in 0..300 {
            ask(&mut bench, number, "");
            *placed.entry(bench.worker_of(number).to_owned()).or_insert(0) += 1;
            release(&mut bench, number);
        }
        assert!(
            placed.len() == 3 && placed.values().all(|count| (60..=140).contains(count)),
            "seed {seed}: {placed:?}"
        );
    }
}

#[test]
fn load_spreads_evenly() {
    let mut bench = with_router(Policy::default());
    let names: Vec<_> = (0..8).map(|index| format!("w{index}")).collect();
    for name in &names {
        bench.run(&format!("worker {name} slots=64"));
    }
    for number in 0..480 {
        ask(&mut bench, number, "prompt=400");
    }
    assert!(names.iter().all(|name| bench.load(name) == 60));
}

#[test]
fn aborted_requests_leave_nothing_behind() {
    let mut bench = bench();
    workers(&mut bench, &["A", "B"], "slots=8");
    for number in 0..400 {
        ask(&mut bench, number, "");
        if number >= 12 {
            let end = if bench.grant(number - 12).is_some() {
                "release"
            } else {
                "withdraw"
            };
            bench.run(&format!("{end} {}", number - 12));
        }
    }
    for number in 388..400 {
        if bench.grant(number).is_some() {
            release(&mut bench, number);
        }
    }
    assert_eq!((bench.load("A"), bench.load("B"), bench.core.queue().len()), (0, 0, 0));
    bench.run("worker C slots=8");
    bench.live(1.0);
    for number in 1000..1024 {
        ask(&mut bench, number, "");
    }
    for name in ["A", "B", "C"] {
        assert!((5..=15).contains(&bench.load(name)), "{name}: {}", bench.load(name));
    }
}

#[test]
fn a_long_prompt_counts_for_several_short_ones() {
    let mut bench = bench();
    bench.run("worker A slots=8 context=100000");
    ask(&mut bench, 0, "prompt=4000");
    bench.run("worker B slots=8 context=100000");
    for number in 1..6 {
        ask(&mut bench, number, "prompt=10");
        assert_eq!(bench.worker_of(number), "B");
    }
    // Once the long prompt is computed, only its answer counts.
    bench.live(1.0);
    ask(&mut bench, 9, "prompt=10");
    assert_eq!(bench.worker_of(9), "A");
}

#[test]
fn who_is_full_is_left_out() {
    let mut bench = bench();
    bench.run_all(
        "worker small slots=2
worker big slots=8",
    );
    for number in 0..10 {
        ask(&mut bench, number, "");
    }
    assert_eq!((bench.load("small"), bench.load("big")), (2, 8));
}

#[test]
fn only_ready_workers_get_requests() {
    for state in ["draining", "unhealthy", "starting"] {
        let mut bench = bench();
        workers(&mut bench, &["A", "B"], "slots=50");
        ask(&mut bench, 0, "");
        bench.run(&format!("report A state={state}"));
        let before = bench.load("A");
        for number in 1..40 {
            ask(&mut bench, number, "");
            assert_eq!(bench.worker_of(number), "B");
        }
        assert_eq!(bench.load("A"), before);
    }
}

#[test]
fn reports_do_not_reset_load() {
    let mut bench = bench();
    bench.run("worker A slots=8");
    for number in 0..8 {
        ask(&mut bench, number, "");
    }
    for _ in 0..20 {
        bench.live(0.5);
        assert_eq!(bench.load("A"), 8);
    }
    ask(&mut bench, 8, "");
    assert!(bench.grant(8).is_none());
}

#[test]
fn a_slot_more_serves_who_waits() {
    let mut bench = bench();
    bench.run_all("worker A slots=1\nask 1\nask 2\nask 3");
    assert_eq!(grants(&bench.run("report A slots=2")), [2]);
}

#[test]
fn the_queue_factor_hides_the_round_trip() {
    let mut bench = with_router(Policy::default());
    bench.run("worker A slots=16");
    for number in 0..30 {
        ask(&mut bench, number, "");
    }
    assert_eq!(bench.load("A"), 20);
}

#[test]
fn one_that_needs_much_room_is_not_passed_over_for_ever() {
    let mut bench = with_router(Policy {
        max_queued: 100,
        ..policy()
    });
    workers(&mut bench, &["A", "B"], "slots=4");
    for number in 0..8 {
        ask(&mut bench, number, "");
    }
    ask(&mut bench, 1000, "n=4");
    let limit = u64::from(PASS_LIMIT);
    let mut number = 8;
    while bench.grant(1000).is_none() {
        assert!(number <= 8 + 2 * limit, "passed over");
        ask(&mut bench, number, "");
        // The oldest ends: on A and B by turns, so that neither is ever empty by itself.
        let oldest = (0..=number).find(|&each| bench.runs(each)).unwrap();
        release(&mut bench, oldest);
        number += 1;
    }
}

#[test]
fn room_kept_for_one_that_leaves_is_given_to_others() {
    let mut bench = bench();
    bench.run_all("worker A slots=2\nask 1\nask 2\nask 3 n=2");
    let place = place_in_queue(&bench, 3);
    bench.core.pass_over(place, PASS_LIMIT);
    bench.run_all("ask 4\nrelease 1");
    assert_eq!(bench.load("A"), 1, "the room is kept for 3");
    bench.run("withdraw 3");
    assert_eq!(grants(&bench.run("report A")), [4]);
}

#[test]
fn room_is_kept_elsewhere_when_its_worker_is_lost() {
    let mut bench = bench();
    bench.run_all("worker A slots=2\nworker B slots=2 state=starting\nask 1\nask 2\nask 3 n=2");
    let place = place_in_queue(&bench, 3);
    bench.core.pass_over(place, PASS_LIMIT);
    bench.run("release 1");
    assert_eq!(bench.core.queue().get(place).unwrap().reserved, Some(bench.links["A"]));
    bench.run_all("report B\nlose A");
    assert_eq!(bench.worker_of(3), "B");
}

// The queue's answers.

#[test]
fn retry_after_comes_from_the_queue_and_the_recent_rate() {
    let mut bench = with_router(Policy {
        max_queued: 20,
        ..policy()
    });
    bench.run("worker A slots=1");
    // One request ends every half second.
    for number in 0..60 {
        ask(&mut bench, number, "");
        bench.live(0.5);
        release(&mut bench, number);
    }
    ask(&mut bench, 60, "");
    let mut waits = None;
    for number in 1000..1020 {
        waits = ask(&mut bench, number, "").pop();
    }
    let refused = refusals(&ask(&mut bench, 2000, ""));
    assert_eq!((refused[0].reason, refused[0].retryable), (Reason::Overloaded, true));
    let about_ten_seconds = 8_500..=11_500;
    assert!(about_ten_seconds.contains(&refused[0].retry_after_ms), "{refused:?}");
    let Some(Action::Waits {
        position, estimate_ms, ..
    }) = waits
    else {
        panic!("{waits:?}");
    };
    assert_eq!(position, 20);
    assert!(about_ten_seconds.contains(&estimate_ms), "{estimate_ms}");
}

#[test]
fn each_ask_is_told_once_that_it_waits() {
    let mut bench = bench();
    bench.run("worker A");
    for number in 0..5 {
        ask(&mut bench, number, "");
    }
    bench.live(3.0);
    let told = bench.log.iter().filter_map(|action| match action {
        Action::Waits { ask, .. } => Some(*ask),
        _ => None,
    });
    assert_eq!(told.collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn the_deadline_is_a_timer() {
    let mut bench = bench();
    bench.run_all("worker A\nask 1\nask 2 left_s=1");
    assert!(refusals(&bench.live(0.99)).is_empty());
    let refused = refusals(&bench.live(0.02));
    assert_eq!((refused[0].ask, refused[0].reason), (2, Reason::DeadlineExceeded));
    assert!(!refused[0].retryable);
    release(&mut bench, 1);
    assert_eq!(bench.load("A"), 0);
}

#[test]
fn never_granted_late_even_by_a_late_driver() {
    let mut bench = bench();
    bench.run_all("worker A\nask 1\nask 2 left_s=0.1");
    bench.now_s += 0.2;
    let done = release(&mut bench, 1);
    assert!(grants(&done).is_empty());
    assert_eq!(refusals(&done)[0].ask, 2);
}

#[test]
fn the_same_number_twice_ends_the_stream() {
    let mut bench = bench();
    bench.run_all("worker A\nask 1\nask 2");
    let dropped = routers_dropped(&bench.run("ask 2"));
    assert!(
        dropped[0].0 == bench.links["r"] && dropped[0].1.contains("twice"),
        "{dropped:?}"
    );
    assert!(bench.core.queue().is_empty());
}

#[test]
fn nonsense_is_refused() {
    let mut bench = bench();
    bench.run("worker A");
    let many = (0..17).map(|index| format!("p{index}")).collect::<Vec<_>>().join(",");
    for (number, options) in ["pools=", "n=0", &format!("pools={many}")].into_iter().enumerate() {
        let refused = refusals(&ask(&mut bench, number as u64, options));
        assert_eq!(
            (refused[0].reason, refused[0].retryable),
            (Reason::InvalidArgument, false)
        );
    }
}

// Leases.

#[test]
fn a_lease_is_released_once() {
    let mut bench = bench();
    bench.run_all("worker A slots=2\nask 1\nask 2\nrelease 1\nrelease 1");
    assert_eq!(bench.load("A"), 1);
    assert_eq!(bench.core.oddities().release_unknown, 1);
}

#[test]
fn a_lease_is_released_by_its_router_only() {
    let mut bench = bench();
    bench.run_all("router s\nworker A slots=2\nask 1");
    let lease = bench.grant(1).unwrap().lease;
    bench.release_lease(bench.links["s"], lease);
    assert_eq!(bench.load("A"), 1);
    assert_eq!(bench.core.oddities().release_foreign, 1);
}

#[test]
fn an_old_instance_keeps_its_requests_to_itself() {
    let mut bench = bench();
    bench.run_all("worker A slots=8\nask 0\nask 1\nask 2\nlose A\nworker A slots=8\nrelease 0\nrelease 1\nrelease 2");
    assert_eq!(bench.load("A"), 0);
    bench.run("ask 9");
    assert_eq!(bench.load("A"), 1);
}

#[test]
fn late_words_of_an_old_stream_are_not_the_new_ones() {
    let mut bench = bench();
    bench.run("worker A instance=same");
    let old = bench.links["A"];
    bench.run_all("lose A\nworker A instance=same");
    bench.step(Event::WorkerLost { link: old });
    let load = Box::new(Load {
        state: WorkerState::Draining,
        ..Load::default()
    });
    bench.step(Event::WorkerReported { link: old, load });
    bench.run("ask 1");
    assert_eq!(bench.load("A"), 1);
}

fn running(lease: LeaseId, instance_id: &str) -> RunningLease {
    RunningLease {
        booking: 0,
        lease,
        instance_id: instance_id.into(),
        request_id: "req".into(),
        tenant: "".into(),
        prompt_tokens: 10,
        max_tokens: 0,
    }
}

fn running_of(bench: &Bench, number: u64) -> RunningLease {
    let grant = bench.grant(number).unwrap();
    running(grant.lease, &grant.instance_id)
}

#[test]
fn a_router_comes_back_with_what_still_runs() {
    let mut bench = bench();
    bench.run_all("worker A slots=4\nask 0\nask 1\nask 2");
    let held = vec![running_of(&bench, 0), running_of(&bench, 2)];
    let lease = held[0].lease;
    bench.run("router-lost r");
    bench.live(1.0);
    assert_eq!(bench.load("A"), 3);
    bench.router("r", held);
    assert_eq!(bench.load("A"), 2);
    bench.live(10.0);
    assert_eq!(bench.load("A"), 2);
    bench.release_lease(bench.links["r"], lease);
    assert_eq!(bench.load("A"), 1);
}

#[test]
fn a_router_opens_a_new_stream_before_the_old_one_is_seen_to_break() {
    let mut bench = bench();
    bench.run_all("worker A\nask 1\nask 2");
    let (old, held) = (bench.links["r"], vec![running_of(&bench, 1)]);
    let before = bench.log.len();
    bench.router("r", held);
    assert_eq!(routers_dropped(&bench.log[before..])[0].0, old);
    assert!(bench.core.queue().is_empty());
    bench.step(Event::RouterLost { link: old });
    bench.live(20.0);
    assert_eq!(bench.load("A"), 1);
}

#[test]
fn leases_of_a_lost_router_expire() {
    let mut bench = bench();
    bench.run_all("worker A slots=4\nask 0\nask 1\nask 2\nrouter-lost r");
    bench.live(4.9);
    assert_eq!(bench.load("A"), 3);
    bench.live(0.2);
    assert_eq!(bench.load("A"), 0);
    assert!(bench.core.routers().is_empty());
}

#[test]
fn a_new_scheduler_learns_of_what_runs() {
    for worker_first in [true, false] {
        let mut bench = Bench::unsettled(policy(), 1);
        if worker_first {
            bench.run("worker A instance=inst-A slots=2");
        }
        bench.router("r", vec![running(7, "inst-A")]);
        if !worker_first {
            bench.run("worker A instance=inst-A slots=2");
        }
        assert_eq!(bench.load("A"), 1);
        bench.run_all("ask 1\nask 2");
        assert_eq!(bench.load("A"), 2);
        bench.release_lease(bench.links["r"], 7);
        assert_eq!(bench.load("A"), 2);
        assert!(bench.grant(2).is_some());
    }
}

#[test]
fn a_new_scheduler_lets_pools_come_back_before_it_refuses() {
    let mut bench = Bench::unsettled(policy(), 1);
    bench.run("router r");
    assert!(matches!(bench.run("ask 1")[..], [Action::Waits { .. }]));
    bench.live(1.0);
    assert_eq!(grants(&bench.run("worker A")), [1]);
    // A pool that was there and is gone is another matter.
    bench.run("lose A");
    assert_eq!(refusals(&bench.run("ask 2"))[0].reason, Reason::Unavailable);
}

#[test]
fn a_new_scheduler_does_not_wait_for_ever() {
    let mut bench = Bench::unsettled(policy(), 1);
    bench.run_all("router r\nask 1");
    let refused = refusals(&bench.live(bench.policy.silence_s()));
    assert_eq!((refused[0].reason, refused[0].retryable), (Reason::Unavailable, true));
}

#[test]
fn leases_announced_twice_or_by_two() {
    let mut bench = Bench::new();
    bench.run("worker A instance=inst-A slots=4");
    bench.router("r", vec![running(7, "inst-A"), running(7, "inst-A")]);
    bench.router("s", vec![running(7, "inst-A")]);
    assert_eq!(bench.load("A"), 1);
    assert_eq!(bench.core.oddities().lease_collision, 1);
}

// Time and heartbeats.

#[test]
fn three_missed_reports_and_a_late_one() {
    let mut bench = Bench::with(Policy {
        heartbeat_s: 1.0,
        heartbeats_missed: 3,
        ..policy()
    });
    bench.run("worker A");
    for _ in 0..5 {
        bench.run_all("+2.9 silent\nreport A");
    }
    assert_eq!(bench.joined(), ["A"]);
    let dropped = workers_dropped(&bench.run("+3.1 silent"));
    assert!(dropped[0].contains("3.00 s"), "{dropped:?}");
}

#[test]
fn our_own_absence_is_not_the_workers_silence() {
    let mut bench = bench();
    bench.run_all("worker A slots=2\nask 1");
    bench.now_s += 60.0;
    assert!(workers_dropped(&bench.step(Event::Tick)).is_empty());
    bench.run_all("report A\n+10");
    assert_eq!(bench.load("A"), 1);
    // But then they must be heard of.
    assert_eq!(workers_dropped(&bench.run("+3.1 silent")).len(), 1);
}

#[test]
fn a_large_fleet_reports_less_often_and_the_scheduler_hears_no_more() {
    let mut bench = Bench::with(Policy {
        heartbeat_s: 1.0,
        heartbeats_missed: 3,
        reports_per_s: 10.0,
        ..policy()
    });
    let told = |actions: &[Action]| {
        let of = |action: &Action| match action {
            Action::Welcomed { heartbeat_ms, .. } | Action::Paced { heartbeat_ms, .. } => Some(*heartbeat_ms),
            _ => None,
        };
        actions.iter().filter_map(of).collect::<Vec<_>>()
    };
    for index in 0..10 {
        assert_eq!(told(&bench.run(&format!("worker w{index}"))), [1000]);
    }
    // Newcomers are told at once, and each of the others in answer to its next report.
    for index in 10..40 {
        bench.run(&format!("worker w{index}"));
    }
    assert_eq!(told(&bench.run("report w0")), [4000]);
    assert!(told(&bench.run("report w0")).is_empty());
    for index in 1..40 {
        bench.run(&format!("report w{index}"));
    }
    // Nobody is silent who reports as often as it was told.
    for _ in 0..3 {
        assert!(workers_dropped(&bench.run("+3.9 silent")).is_empty());
        for index in 0..40 {
            bench.run(&format!("report w{index}"));
        }
    }
    assert_eq!(bench.joined().len(), 40);
    // 12 s are three of its reports.
    for index in 5..40 {
        bench.run(&format!("lose w{index}"));
    }
    assert_eq!(told(&bench.run("report w0")), [1000]);
    assert_eq!(workers_dropped(&bench.run("+3.1 silent")).len(), 1);
    assert_eq!(workers_dropped(&bench.run("+8.0 silent")).len(), 0);
    assert_eq!(workers_dropped(&bench.run("+1.0 silent")).len(), 4);
}

#[test]
fn reports_in_time_need_no_wakeups() {
    let mut bench = Bench::new();
    for index in 0..50 {
        bench.run(&format!("worker w{index}"));
    }
    bench.run("+0.1 silent");
    let mut wakeups = 0;
    for _ in 0..120 {
        wakeups += u32::from(bench.core.next_wakeup().unwrap() <= bench.now_s + 0.25);
        bench.live(0.25);
    }
    let most = 120.0 * 0.25 / (bench.policy.silence_s() - 0.25) + 1.0;
    assert!(f64::from(wakeups) <= most, "{wakeups}");
}

// The fleet as routers see it.

fn times_told(actions: &[Action]) -> usize {
    actions
        .iter()
        .filter(|action| matches!(action, Action::FleetChanged))
        .count()
}

#[test]
fn changes_of_the_fleet_are_told_and_gathered() {
    let mut bench = Bench::new();
    bench.run("+1 silent");
    let commands = (0..100).map(|index| format!("worker w{index}\n")).collect::<String>();
    assert_eq!(times_told(&bench.run_all(&commands)), 1);
    assert_eq!(times_told(&bench.run("+1 silent")), 1);
    let view = bench.core.fleet().view();
    assert_eq!(
        (
            &*view[0].name,
            view[0].workers,
            view[0].ready_workers,
            view[0].addresses.len()
        ),
        ("p", 100, 100, 100)
    );
    assert_eq!(times_told(&bench.live(2.0)), 0);
    assert_eq!(times_told(&bench.run("report w3 state=draining")), 1);
    let view = bench.core.fleet().view();
    assert_eq!((view[0].workers, view[0].ready_workers), (100, 99));
    assert!(!view[0].addresses.iter().any(|address| &**address == "w3:1"));
}

#[test]
fn a_view_promises_what_every_worker_can_do() {
    let mut bench = Bench::new();
    for (link, guided, context_tokens) in [(1, &["regex", "json_schema"][..], 100), (2, &["json_schema"], 200)] {
        let mut hello = WorkerHello {
            worker_id: "w".into(),
            instance_id: format!("i{link}").into(),
            pool: "p".into(),
            address: format!("h:{link}").into(),
            ..WorkerHello::default()
        };
        hello.description.context_tokens = context_tokens;
        hello.description.capabilities.guided = guided.iter().map(|kind| Arc::from(*kind)).collect();
        hello.description.capabilities.logprobs = link == 1;
        bench.step(Event::WorkerJoined {
            link,
            hello: Box::new(hello),
        });
    }
    let described = &bench.core.fleet().view()[0].description;
    assert_eq!(described.context_tokens, 200);
    assert_eq!(described.capabilities.guided, [Arc::from("json_schema")]);
    assert!(!described.capabilities.logprobs);
}

#[test]
fn a_pool_ends_with_its_last_worker() {
    let mut bench = Bench::new();
    bench.run_all("worker A model=one\nlose A");
    assert!(bench.core.fleet().view().is_empty());
    bench.run("worker A model=two");
    assert_eq!(bench.core.fleet().view()[0].workers, 1);
}

#[test]
fn a_worker_must_say_who_it_is() {
    for missing in ["worker_id", "instance_id", "pool", "address"] {
        let say = |name: &str| Arc::from(if name == missing { "" } else { name });
        let hello = Box::new(WorkerHello {
            worker_id: say("worker_id"),
            instance_id: say("instance_id"),
            pool: say("pool"),
            address: say("address"),
            ..WorkerHello::default()
        });
        let done = Bench::new().step(Event::WorkerJoined { link: 1, hello });
        let [Action::JoinRefused { message, .. }] = &done[..] else {
            panic!("{done:?}");
        };
        assert!(message.contains(missing), "{message}");
    }
}

#[test]
fn fifty_come_and_go() {
    let mut bench = bench();
    for index in 0..50 {
        bench.run_all(&format!("worker w{index}\nask {index}\nlose w{index}"));
    }
    let fleet = bench.core.fleet();
    assert!(fleet.workers.is_empty() && fleet.pools.is_empty() && fleet.leases.is_empty());
}

#[test]
fn a_full_fleet_is_not_searched() {
    let mut bench = bench();
    for index in 0..100 {
        bench.run_all(&format!("worker w{index}\nask {index}"));
    }
    assert!(bench.core.fleet().pools["p"].at.is_empty());
    assert!(matches!(bench.run("ask 1000")[..], [Action::Waits { .. }]));
}
