//! Prompts that begin alike: who holds the beginning counts, who is about to hold it too, and a busy holder is not the last.

use super::*;
use crate::scheduler::events::BlockChange;

/// Blocks of 16 tokens that all prompts here begin with, and tokens of a prompt.
const HEAD: u64 = 94;
const PROMPT: u32 = 1600;

/// Two workers whose prompt tokens take 1 ms each and who say what they hold, and router r.
fn two() -> Bench {
    let mut bench = Bench::with(policy());
    bench.run_all("router r\nworker A slots=64 context=100000\nworker B slots=64 context=100000");
    bench.teach("A", 1.0);
    for name in ["A", "B"] {
        says(&mut bench, name, BlockChange::Cleared);
    }
    bench
}

fn says(bench: &mut Bench, worker: &str, change: BlockChange) {
    let link = bench.links[worker];
    bench.step(Event::BlocksChanged { link, change });
}

fn ask(bench: &mut Bench, number: u64) -> Vec<Action> {
    let blocks = (1..=HEAD)
        .chain(number * 1000..number * 1000 + 6)
        .map(|block| block.to_string());
    let blocks: Vec<String> = blocks.collect();
    bench.run(&format!("ask {number} prompt={PROMPT} blocks={}", blocks.join(",")))
}

#[test]
fn a_burst_computes_its_beginning_once_a_worker() {
    let mut bench = two();
    let asks = 16;
    (1..=asks).for_each(|number| drop(ask(&mut bench, number)));
    let mut begun = 0;
    // Nobody has said a word of blocks: all that is known is who was given what.
    while begun < bench.granted.len() {
        let granted: Vec<u64> = bench.granted.keys().map(|key| key.1).collect();
        begun = granted.len();
        granted
            .into_iter()
            .for_each(|number| drop(bench.run(&format!("progress {number}"))));
        bench.run("+2 silent");
    }
    assert_eq!(begun as u64, asks);
    let grants = bench.granted.values();
    let computed: u64 = grants
        .clone()
        .map(|grant| u64::from(PROMPT - grant.cached_tokens))
        .sum();
    let workers: BTreeSet<_> = grants.map(|grant| grant.worker).collect();
    let (head, tail) = (16 * HEAD, u64::from(PROMPT) - 16 * HEAD);
    assert_eq!(computed, workers.len() as u64 * head + asks * tail);
}

#[test]
fn what_was_expected_is_forgotten_with_the_request() {
    let mut bench = two();
    ask(&mut bench, 1);
    let first = bench.worker_of(1).to_owned();
    bench.run("release 1");
    ask(&mut bench, 2);
    assert_eq!(bench.grant(2).unwrap().cached_tokens, 0);
    // And with its worker.
    ask(&mut bench, 3);
    bench.run(&format!("lose {first}"));
    bench.run(&format!("lose {}", if first == "A" { "B" } else { "A" }));
    bench.run("worker C slots=64 context=100000");
    says(&mut bench, "C", BlockChange::Cleared);
    ask(&mut bench, 4);
    assert_eq!((bench.worker_of(4), bench.grant(4).unwrap().cached_tokens), ("C", 0));
}

#[test]
fn a_hot_beginning_spreads_to_who_had_the_time_to_compute_it() {
    let mut bench = two();
    says(&mut bench, "A", BlockChange::Stored((1..=HEAD).collect()));
    let mut order = Vec::new();
    for number in 1..=12 {
        // In the end B has been idle for longer than the beginning takes.
        bench.run("+0.2 silent");
        ask(&mut bench, number);
        bench.run(&format!("progress {number}"));
        let grant = bench.grant(number).unwrap();
        order.push((bench.worker_of(number).to_owned(), grant.cached_tokens > 0));
        assert_eq!(grant.why.hit_tokens, grant.cached_tokens);
        assert!(grant.why.score > 0.0);
    }
    let spread = order.iter().position(|(worker, _)| worker == "B").unwrap();
    assert!((5..9).contains(&spread), "{order:?}");
    assert_eq!(
        order.iter().filter(|(_, hit)| !hit).count(),
        1,
        "computed once more: {order:?}"
    );
    assert!(
        order[spread..].iter().filter(|(worker, _)| worker == "B").count() >= 3,
        "{order:?}"
    );
}

#[test]
fn a_worker_that_is_idle_for_a_moment_leaves_what_another_holds() {
    let mut bench = two();
    says(&mut bench, "A", BlockChange::Stored((1..=HEAD).collect()));
    // B has had something to do until now, which nobody else asks for.
    bench.run(&format!("ask 100 prompt={PROMPT}"));
    if bench.worker_of(100) == "A" {
        bench.run(&format!("ask 101 prompt={PROMPT}"));
    }
    bench.run("+2 silent");
    for number in 100..=101 {
        if bench.granted.keys().any(|key| key.1 == number) {
            bench.run(&format!("release {number}"));
        }
    }
    let mut on_b = Vec::new();
    for number in 1..=6 {
        ask(&mut bench, number);
        bench.run(&format!("progress {number}"));
        on_b.push(bench.worker_of(number) == "B");
    }
    assert_eq!(on_b, [false; 6]);
}
