//! How long an answer will be: quantiles of what was seen of the same tenant and the same beginning of a prompt.
//!
//! Answers are counted in bins that widen with their length, and old ones fade. Where too few were seen of a beginning, the
//! tenant's answers stand in, and then everybody's. While an answer grows, what was shorter is out of question: the estimate
//! of what is left is made from the longer ones only.

use std::{collections::BTreeMap, sync::Arc};

use super::{events::Ask, map::Map};

/// Each bin is so many times as wide as the one before; some 40 reach from one token to 100,000.
const WIDTH: f64 = 1.35;
const BINS: usize = 42;

/// Answers that count at most: the older ones of many fade.
const MEMORY: f32 = 400.0;

/// Answers seen before a beginning speaks for itself.
const ENOUGH: f32 = 8.0;

/// Beginnings remembered; the one that was not used for longest goes.
const MAX_SKETCHES: usize = 4096;

/// What an answer is taken for when nothing was ever seen.
pub const UNKNOWN_TOKENS: u32 = 256;

/// Counts of answers by length.
#[derive(Clone, Debug)]
struct Sketch {
    counts: [f32; BINS],
    total: f32,
    used: u64,
}

impl Default for Sketch {
    fn default() -> Self {
        Self {
            counts: [0.0; BINS],
            total: 0.0,
            used: 0,
        }
    }
}

fn bin(tokens: u32) -> usize {
    let bin = f64::from(tokens.max(1)).ln() / WIDTH.ln();
    (bin as usize).min(BINS - 1)
}

/// The middle of a bin.
fn tokens_of(bin: usize) -> u32 {
    WIDTH.powf(bin as f64 + 0.5).round().max(1.0) as u32
}

impl Sketch {
    fn add(&mut self, tokens: u32) {
        if self.total >= MEMORY {
            for count in &mut self.counts {
                *count *= 0.5;
            }
            self.total *= 0.5;
        }
        self.counts[bin(tokens)] += 1.0;
        self.total += 1.0;
    }

    /// The length that this share of those of more than `beyond` tokens stays within; None when too few are.
    fn quantile(&self, share: f32, beyond: u32) -> Option<u32> {
        let first = if beyond == 0 { 0 } else { bin(beyond) };
        let longer = &self.counts[first..];
        let total: f32 = longer.iter().sum();
        if total < if beyond == 0 { ENOUGH } else { 1.0 } {
            return None;
        }
        let mut sum = 0.0;
        for (offset, count) in longer.iter().enumerate() {
            sum += count;
            if sum >= share * total {
                return Some(tokens_of(first + offset).max(beyond.saturating_add(1)));
            }
        }
        None
    }
}

/// What an answer is believed to have in common with others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Root {
    /// Whose it is.
    pub tenant: Arc<str>,
    /// The first block of its prompt; 0 = it has none.
    pub block: u64,
}

impl Root {
    /// That of an ask.
    pub fn of(ask: &Ask) -> Self {
        Self {
            tenant: ask.tenant.clone(),
            block: ask.block_hashes.first().copied().unwrap_or(0),
        }
    }
}

/// All that was seen.
#[derive(Debug, Default)]
pub struct Lengths {
    roots: Map<Root, Sketch>,
    everything: Sketch,
    clock: u64,
    by_use: BTreeMap<u64, Root>,
}

impl Lengths {
    /// An answer that ended by itself or at its limit.
    pub fn observe(&mut self, root: &Root, tokens: u32) {
        self.everything.add(tokens);
        self.touch(root).add(tokens);
        if root.block != 0 {
            let tenant = Root {
                tenant: root.tenant.clone(),
                block: 0,
            };
            self.touch(&tenant).add(tokens);
        }
    }

    /// The length that this share of such answers stays within, of those that are longer than `beyond`.
    pub fn quantile(&self, root: &Root, share: f32, beyond: u32) -> Option<u32> {
        let of = |block| {
            let root = Root {
                tenant: root.tenant.clone(),
                block,
            };
            self.roots.get(&root).and_then(|sketch| sketch.quantile(share, beyond))
        };
        of(root.block)
            .or_else(|| of(0))
            .or_else(|| self.everything.quantile(share, beyond))
    }

    /// What such an answer will most likely have in all, when it has `so_far` already.
    pub fn expected(&self, root: &Root, so_far: u32, max_tokens: u32) -> u32 {
        let guess = self
            .quantile(root, 0.5, so_far)
            .unwrap_or(UNKNOWN_TOKENS.max(so_far + so_far / 2));
        if max_tokens > 0 {
            guess.min(max_tokens)
        } else {
            guess
        }
    }

    /// Beginnings and tenants remembered.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.roots.len()
    }

    fn touch(&mut self, root: &Root) -> &mut Sketch {
        if self.roots.len() >= MAX_SKETCHES && !self.roots.contains_key(root) {
            if let Some((_, oldest)) = self.by_use.pop_first() {
                self.roots.remove(&oldest);
            }
        }
        self.clock += 1;
        let sketch = self.roots.entry(root.clone()).or_default();
        if sketch.used != 0 {
            self.by_use.remove(&sketch.used);
        }
        sketch.used = self.clock;
        self.by_use.insert(self.clock, root.clone());
        sketch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(tenant: &str, block: u64) -> Root {
        Root {
            tenant: tenant.into(),
            block,
        }
    }

    #[test]
    fn a_beginning_speaks_for_itself_once_enough_was_seen() {
        let mut lengths = Lengths::default();
        assert_eq!(lengths.expected(&root("t", 1), 0, 0), UNKNOWN_TOKENS);
        for _ in 0..100 {
            lengths.observe(&root("t", 1), 3);
            lengths.observe(&root("t", 2), 600);
        }
        let near = |found: u32, tokens: u32| {
            found as f64 / f64::from(tokens) < 1.4 && f64::from(tokens) / (found as f64) < 1.4
        };
        assert!(near(lengths.expected(&root("t", 1), 0, 0), 3));
        assert!(near(lengths.expected(&root("t", 2), 0, 0), 600));
        assert_eq!(lengths.expected(&root("t", 2), 0, 100), 100);
        // A new beginning of the tenant; a new tenant.
        assert!(lengths
            .quantile(&root("t", 3), 0.9, 0)
            .is_some_and(|tokens| near(tokens, 600)));
        assert!(lengths
            .quantile(&root("u", 3), 0.9, 0)
            .is_some_and(|tokens| near(tokens, 600)));
    }

    #[test]
    fn what_has_been_said_rules_shorter_ones_out() {
        let mut lengths = Lengths::default();
        for _ in 0..90 {
            lengths.observe(&root("t", 1), 20);
        }
        for _ in 0..10 {
            lengths.observe(&root("t", 1), 2000);
        }
        assert!(lengths.expected(&root("t", 1), 0, 0) < 40);
        assert!(lengths.expected(&root("t", 1), 100, 0) > 1000);
        assert!(lengths.expected(&root("t", 1), 50_000, 0) > 50_000);
    }

    #[test]
    fn memory_is_bounded() {
        let mut lengths = Lengths::default();
        for block in 1..20_000 {
            lengths.observe(&root("t", block), 10);
        }
        assert!(lengths.len() <= MAX_SKETCHES);
        assert_eq!(lengths.by_use.len(), lengths.len());
    }

    #[test]
    fn what_was_long_ago_fades() {
        let mut lengths = Lengths::default();
        for _ in 0..1000 {
            lengths.observe(&root("t", 1), 10);
        }
        for _ in 0..1000 {
            lengths.observe(&root("t", 1), 1000);
        }
        assert!(lengths.expected(&root("t", 1), 0, 0) > 700);
    }
}
