//! Counts steps of work in tests: growth can be asserted by counts, never by a clock.

use std::cell::Cell;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Texts that, repeated, were quadratic for some tokenizer.
pub(crate) const RUNS: [&str; 14] = [
    "a", " ", "\n", "\u{301}", "7", "aA", "'", " \n", "中", "A中", "🙂", "\x04", "\u{3000}", "a\u{301}",
];

pub(crate) fn count(steps: u64) {
    STEPS.with(|total| total.set(total.get() + steps));
}

/// The steps that `work` takes on this thread.
pub(crate) fn counted(work: impl FnOnce()) -> u64 {
    let before = STEPS.with(Cell::get);
    work();
    STEPS.with(Cell::get) - before
}
