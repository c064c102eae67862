//! Prompts computed on one worker, answers made on another: when, and that both workers' room is held and given back.

use super::*;
use crate::scheduler::Disaggregation;

fn apart(disaggregation: Disaggregation) -> Policy {
    Policy {
        disaggregation,
        disaggregation_min_tokens: 100,
        ..policy()
    }
}

/// A worker for prompts and one that answers.
fn pair(disaggregation: Disaggregation, more: &str) -> Bench {
    let mut bench = Bench::with(apart(disaggregation));
    bench.run("router r");
    bench.run(&format!("worker P role=prefill slots=8 {more}"));
    bench.run(&format!("worker D role=decode slots=8 {more}"));
    bench
}

impl Bench {
    /// Who computes the prompt of that ask, when it is not who answers.
    fn prefill_of(&self, number: u64) -> Option<&str> {
        let prefill = self.grant(number).unwrap().prefill.as_ref();
        prefill.map(|prefill| &*prefill.worker_id)
    }

    fn prefill_lease(&self, number: u64) -> LeaseId {
        self.grant(number).unwrap().prefill.as_ref().unwrap().lease
    }

    /// The first token of that ask has come from the worker that computed its prompt.
    fn hands_over(&mut self, number: u64) {
        let (link, lease) = (self.links["r"], self.prefill_lease(number));
        self.step(Event::Progressed {
            link,
            lease,
            output_tokens: 1,
        });
        self.release_lease(link, lease);
    }

    fn loads(&self) -> (usize, usize) {
        (self.load("P"), self.load("D"))
    }
}

#[test]
fn both_workers_give_room_and_get_it_back_each_when_its_part_is_over() {
    let mut bench = pair(Disaggregation::Always, "");
    bench.run("ask 1 prompt=500 part=1");
    assert_eq!((bench.worker_of(1), bench.prefill_of(1)), ("D", Some("P")));
    assert_eq!(bench.loads(), (1, 1));
    bench.hands_over(1);
    assert_eq!(bench.loads(), (0, 1));
    bench.run("progress 1");
    bench.run("release 1 tokens=5 prompt=500");
    assert_eq!(bench.loads(), (0, 0));
    assert_eq!(bench.core.measures().parted, 1);
    // In the other order, as when the client leaves.
    bench.run("ask 2 prompt=500 part=1");
    bench.run("release 2");
    assert_eq!(bench.loads(), (1, 0));
    let (link, lease) = (bench.links["r"], bench.prefill_lease(2));
    bench.release_lease(link, lease);
    bench.run("router-lost r");
    bench.live(bench.policy.router_grace_s + 1.0);
    bench.core.check_empty();
}

#[test]
fn only_long_prompts_of_first_attempts_that_may_part_do() {
    let mut bench = pair(Disaggregation::Always, "");
    for (number, how) in [
        "prompt=500",
        "prompt=99 part=1",
        "prompt=500 part=1 n=2",
        "prompt=500 part=1 epoch=2",
    ]
    .into_iter()
    .enumerate()
    {
        bench.run(&format!("ask {number} {how}"));
        assert_eq!(
            (bench.worker_of(number as u64), bench.prefill_of(number as u64)),
            ("D", None),
            "{how}"
        );
    }
    let mut off = pair(Disaggregation::Off, "");
    off.run("ask 1 prompt=500 part=1");
    assert_eq!((off.worker_of(1), off.prefill_of(1)), ("D", None));
    // KV of one is of no use to the other.
    let mut bench = Bench::with(apart(Disaggregation::Always));
    bench.run("router r");
    bench.run("worker P role=prefill tag=a");
    bench.run("worker D role=decode tag=b");
    bench.run("ask 1 prompt=500 part=1");
    assert_eq!((bench.worker_of(1), bench.prefill_of(1)), ("D", None));
}

#[test]
fn a_prompt_parts_where_that_delays_less_and_not_before_it_can_be_told() {
    let mut bench = pair(Disaggregation::Auto, "kv_token_bytes=1000");
    bench.run("ask 1 prompt=500 part=1");
    assert_eq!(bench.prefill_of(1), None, "nothing is known yet");
    bench.run("release 1");
    bench.teach("D", 0.5);
    bench.teach("P", 0.5);
    bench.run("ask 2 prompt=500 part=1");
    assert_eq!(bench.prefill_of(2), None, "nobody would be delayed");
    bench.run("progress 2");
    bench.run("ask 3 prompt=500 part=1");
    assert_eq!((bench.worker_of(3), bench.prefill_of(3)), ("D", Some("P")));
    // With a way that takes longer than the prompt, it stays.
    bench.hands_over(3);
    let slow = Load {
        state: WorkerState::Ready,
        kv_received_bytes: 1 << 30,
        kv_receive_s: 1e4,
        ..Load::default()
    };
    let link = bench.links["D"];
    bench.step(Event::WorkerReported {
        link,
        load: Box::new(slow),
    });
    bench.run("ask 4 prompt=500 part=1");
    assert_eq!((bench.worker_of(4), bench.prefill_of(4)), ("D", None));
}

#[test]
fn what_waits_for_its_prompt_is_not_given_ahead_and_goes_when_there_is_time() {
    let mut bench = pair(Disaggregation::Always, "");
    bench.teach("P", 0.5);
    bench.run("ask 1 prompt=900 part=1");
    bench.run("ask 2 prompt=900 part=1");
    // 450 ms of prompt are before it, and a tenth of a second may be.
    assert!(bench.grant(2).is_none());
    // Nothing of that concerns who only wants to be answered.
    bench.run("ask 3 prompt=10 part=1");
    assert_eq!(bench.worker_of(3), "D");
    bench.hands_over(1);
    assert_eq!((bench.worker_of(2), bench.prefill_of(2)), ("D", Some("P")));
}

#[test]
fn who_finds_nobody_to_answer_waits_for_that() {
    let mut bench = Bench::with(apart(Disaggregation::Always));
    bench.run("router r");
    bench.run("worker P role=prefill slots=8");
    bench.run("worker D role=decode slots=1");
    bench.run("ask 1 prompt=10");
    bench.run("ask 2 prompt=500 part=1");
    assert!(bench.grant(2).is_none() && bench.load("P") == 0);
    bench.run("release 1");
    assert_eq!((bench.worker_of(2), bench.prefill_of(2)), ("D", Some("P")));
}

#[test]
fn a_worker_that_is_lost_takes_its_own_part_with_it() {
    for lost in ["P", "D"] {
        let mut bench = pair(Disaggregation::Always, "");
        bench.run("ask 1 prompt=500 part=1");
        bench.run(&format!("lose {lost}"));
        assert_eq!(bench.core.fleet().leases.len(), 1);
        let (link, lease) = (bench.links["r"], bench.prefill_lease(1));
        bench.release_lease(link, lease);
        bench.run("release 1");
        assert_eq!(bench.core.oddities().release_unknown, 1);
        bench.core.fleet().check_empty();
        // Whoever is left serves whole requests, also a worker that is there for prompts.
        bench.run("ask 2 prompt=500 part=1");
        assert_eq!(
            (bench.worker_of(2), bench.prefill_of(2)),
            (if lost == "P" { "D" } else { "P" }, None)
        );
    }
}

#[test]
fn what_waits_for_a_worker_that_is_lost_finds_another() {
    let mut bench = pair(Disaggregation::Always, "");
    bench.teach("P", 0.5);
    bench.run("ask 1 prompt=900 part=1");
    bench.run("ask 2 prompt=900 part=1");
    assert!(bench.grant(2).is_none());
    bench.run("lose P");
    assert_eq!((bench.worker_of(2), bench.prefill_of(2)), ("D", None));
}

#[test]
fn a_worker_that_failed_it_is_avoided_even_for_one_that_is_for_prompts() {
    let mut bench = pair(Disaggregation::Always, "");
    bench.run("ask 1 prompt=500 part=1 epoch=2 avoid=D");
    assert_eq!((bench.worker_of(1), bench.prefill_of(1)), ("P", None));
}

#[test]
fn kv_that_is_to_come_has_its_room_though_no_report_knows_of_it() {
    // 640 tokens.
    let mut bench = pair(Disaggregation::Always, "kv_blocks=40");
    bench.run("ask 1 prompt=500 part=1");
    bench.run("+1");
    bench.run("ask 2 prompt=300");
    assert!(bench.grant(2).is_none(), "there would be no room for what comes");
    bench.hands_over(1);
    // It has come, and the report after that counts it: as much as it was thought to be, less, or nothing yet.
    bench.run("progress 1");
    assert!(bench.grant(2).is_none());
    bench.run("report D kv_blocks_used=32");
    bench.run("+1");
    assert!(bench.grant(2).is_none());
    bench.run("release 1");
    bench.run("report D kv_blocks_used=0");
    assert_eq!(bench.worker_of(2), "D");
}

#[test]
fn nothing_is_lent_of_a_worker_for_prompts_and_long_ones_have_to_be_asked_for() {
    let mut bench = Bench::with(Policy {
        credits: true,
        ..apart(Disaggregation::Always)
    });
    bench.run("router r");
    bench.run("worker D role=decode slots=8");
    let lent = |actions: &[Action]| -> Vec<(Link, u32)> {
        let of = |action: &Action| match action {
            Action::Lent { share, outlook } => Some((share.worker, outlook.ask_from_tokens)),
            Action::News { worker, outlook, .. } => Some((*worker, outlook.ask_from_tokens)),
            _ => None,
        };
        actions.iter().filter_map(of).collect()
    };
    bench.run("+1");
    let said = bench.log.clone();
    assert!(
        lent(&said).iter().all(|said| *said == (bench.links["D"], 0)) && !lent(&said).is_empty(),
        "{said:?}"
    );
    bench.run("worker P role=prefill slots=8");
    bench.run("+1");
    let said = bench.log.clone();
    assert_eq!(lent(&said).last(), Some(&(bench.links["D"], 100)));
    assert!(lent(&said).iter().all(|(worker, _)| *worker == bench.links["D"]));
    bench.run("lose P");
    bench.run("+1");
    let said = bench.log.clone();
    assert_eq!(lent(&said).last(), Some(&(bench.links["D"], 0)));
}
