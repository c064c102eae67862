//! A request's entry in the scheduler's books: opened before anything is asked, settled once with what it cost in the end.

use std::{sync::Arc, time::Instant};

use super::{
    links::{scheduler::Scheduler, worker::Books},
    unix_s_f64,
};
use crate::proto::{Outcome, Settlement, Usage};

/// One request's entry, over all its attempts.
pub struct Booking {
    scheduler: Arc<Scheduler>,
    said: Settlement,
    settled: bool,
    asked: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    /// It may have so many tokens, over all choices; 0 = no limit of its own.
    pub allowance: u32,
    /// Ids that came, over the attempts that go on from one another.
    came: u32,
}

impl Booking {
    /// Opens it. `account`: who asks, for what; the rest of it is filled in here.
    pub fn open(scheduler: &Arc<Scheduler>, account: Settlement) -> Self {
        let booking = scheduler.open_booking();
        Self {
            scheduler: scheduler.clone(),
            said: Settlement {
                booking,
                placed_s: unix_s_f64(),
                ..account
            },
            settled: false,
            asked: Instant::now(),
            first: None,
            last: None,
            allowance: 0,
            came: 0,
        }
    }

    /// Its number.
    pub fn id(&self) -> u64 {
        self.said.booking
    }

    /// A worker of that pool is asked to run it, after so long in the queue.
    pub fn runs(&mut self, pool: &str, queue_s: f32, allowance: u32) {
        self.said.ran = true;
        pool.clone_into(&mut self.said.pool);
        self.said.queue_s += queue_s;
        self.allowance = allowance;
    }

    /// What an attempt brought that has ended, beyond the ids of earlier ones.
    pub fn ran(&mut self, books: &Books, resumed_tokens: u32) {
        self.said.kv_block_s += books.kv_block_s;
        self.came = resumed_tokens + books.completion_tokens;
        self.first = self.first.or(books.first);
        self.last = books.last.or(self.last);
    }

    /// All that came is thrown away: it starts again.
    pub fn restarts(&mut self) {
        self.said.wasted_tokens += std::mem::take(&mut self.came);
        (self.first, self.last) = (None, None);
    }

    /// The best variant answers after all: what this one cost comes on top.
    pub fn saves_nothing(&mut self) {
        self.said.best_pool.clear();
    }

    /// The answer came from the response cache, where that pool had left it.
    pub fn replayed(&mut self, pool: &str) {
        pool.clone_into(&mut self.said.pool);
        self.said.replayed = true;
    }

    /// How many ids count of a request that did not get its whole answer: those that came, and were shown or not.
    pub fn cut_tokens(&self, taken: u32) -> u32 {
        let came = taken.max(self.came);
        match self.allowance {
            0 => came,
            allowance => came.min(allowance),
        }
    }

    /// It has ended. Only the first word counts.
    pub fn settle(&mut self, outcome: Outcome, usage: Usage) {
        if std::mem::replace(&mut self.settled, true) {
            return;
        }
        let mut said = std::mem::take(&mut self.said);
        said.outcome = outcome as i32;
        said.usage = Some(usage);
        if let (Some(first), Some(last)) = (self.first, self.last) {
            said.ttft_s = first.saturating_duration_since(self.asked).as_secs_f32();
            said.decode_s = last.saturating_duration_since(first).as_secs_f32();
        }
        self.scheduler.settle(said);
    }
}
