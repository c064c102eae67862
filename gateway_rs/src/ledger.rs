//! The scheduler's books on the wire: what routers settle, and when they are told that it is durable.

use std::collections::{BTreeMap, VecDeque};

use headrace_core::{
    budgets::{Price, Settlement},
    scheduler::events::Link,
};

use crate::{
    proto::{self, Outcome},
    scheduler::class_of,
};

/// What routers have settled and have not been told to be durable.
#[derive(Debug, Default)]
pub struct Acks {
    /// For each stream, the router's numbers, each with how many entries of the books have to be done.
    waiting: BTreeMap<Link, VecDeque<(u64, u64)>>,
}

impl Acks {
    /// A router's settlement is durable when so many entries are done.
    pub fn add(&mut self, link: Link, number: u64, entries: u64) {
        self.waiting.entry(link).or_default().push_back((number, entries));
    }

    /// A router's stream is over: it will settle again what it was not told of.
    pub fn forget(&mut self, link: Link) {
        self.waiting.remove(&link);
    }

    /// So many entries are done: up to which number each router's settlements are durable, where that is news.
    pub fn due(&mut self, done: u64) -> Vec<(Link, u64)> {
        let mut due = Vec::new();
        self.waiting.retain(|&link, waiting| {
            let mut last = None;
            while let Some(&(number, _)) = waiting.front().filter(|(_, entries)| *entries <= done) {
                waiting.pop_front();
                last = Some(number);
            }
            due.extend(last.map(|number| (link, number)));
            !waiting.is_empty()
        });
        due
    }
}

/// The name of an outcome, as the ledger has it.
pub fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Unspecified | Outcome::Failed => "failed",
        Outcome::Stop => "stop",
        Outcome::Length => "length",
        Outcome::ToolCalls => "tool_calls",
        Outcome::Deadline => "deadline",
        Outcome::Budget => "budget",
        Outcome::Cancelled => "cancelled",
        Outcome::WorkerLost => "worker_lost",
        Outcome::Rejected => "rejected",
    }
}

/// A message as a value; who says it is filled in by whom it is said to.
pub fn settlement(said: proto::Settlement) -> Settlement {
    let usage = said.usage.unwrap_or_default();
    let outcome = said.outcome();
    Settlement {
        booking: said.booking,
        router: "".into(),
        request_id: said.request_id.into(),
        tenant: said.tenant.into(),
        session: said.session_id.into(),
        alias: said.alias.into(),
        pool: said.pool.into(),
        best: said.best_pool.into(),
        best_price: Price::default(),
        shadow: said.shadow,
        class: class_of(said.class),
        placed_s: said.placed_s,
        outcome: outcome_name(outcome).into(),
        our_fault: matches!(
            outcome,
            Outcome::Unspecified | Outcome::Failed | Outcome::WorkerLost | Outcome::Rejected
        ),
        ran: said.ran,
        replayed: said.replayed,
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_prompt_tokens,
        output_tokens: usage.completion_tokens,
        wasted_tokens: said.wasted_tokens,
        queue_s: said.queue_s.into(),
        ttft_s: said.ttft_s.into(),
        decode_s: said.decode_s.into(),
        kv_block_s: said.kv_block_s.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_are_told_in_their_order_and_once() {
        let mut acks = Acks::default();
        acks.add(1, 1, 2);
        // A second copy of what was settled on an earlier stream: its entry is an old one.
        acks.add(1, 2, 1);
        acks.add(1, 3, 4);
        acks.add(2, 7, 3);
        acks.add(3, 1, 0);
        assert_eq!(acks.due(0), [(3, 1)]);
        assert_eq!(acks.due(1), []);
        assert_eq!(acks.due(3), [(1, 2), (2, 7)]);
        acks.forget(1);
        assert_eq!(acks.due(9), []);
    }
}
