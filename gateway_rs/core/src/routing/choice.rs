//! The order in which variants are asked for one request.
//!
//! First the one that the request should go to: by its own wish, or the smallest of which enough agreement is expected. What
//! is better than that may serve it too, whenever it has room; what is worse only where it is named as a fallback, and only
//! after the others have refused. A new version takes its share of its old version's requests, always the same sessions.

use smallvec::SmallVec;

/// What the request says of quality.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// Nothing: by its difficulty.
    #[default]
    Routed,
    /// The best variant, or an error.
    Full,
    /// The smallest will do.
    Tolerant,
}

impl Wish {
    /// As clients and files write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Routed => "routed",
            Self::Full => "full",
            Self::Tolerant => "tolerant",
        }
    }

    /// The wish of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Routed, Self::Full, Self::Tolerant]
            .into_iter()
            .find(|wish| wish.name() == name)
    }
}

/// A variant, as it is for this request now. The best comes first.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Who asks may use it, and it understands what is asked.
    pub permitted: bool,
    /// It has workers that take requests.
    pub ready: bool,
    /// Agreement with the best variant, as measured, or as configured until then.
    pub quality: f32,
    /// Agreement expected for this request.
    pub expected: f32,
    /// Enough to go here.
    pub threshold: f32,
    /// May serve what was meant for a better one.
    pub is_fallback: bool,
    /// The variant that this is a new version of, and its share of that one's requests now.
    pub replaces: Option<(usize, f32)>,
}

/// Why the first variant is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// There is no other.
    Only,
    /// The request wants the best.
    Full,
    /// The request takes the smallest.
    Tolerant,
    /// Enough agreement is expected of it.
    Easy,
    /// Not enough is expected of any smaller one.
    Hard,
}

impl Why {
    /// For metrics and spans.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Full => "full",
            Self::Tolerant => "tolerant",
            Self::Easy => "easy",
            Self::Hard => "hard",
        }
    }
}

/// Variants by their numbers.
pub type Numbers = SmallVec<[usize; 4]>;

/// What was chosen for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Whom it is meant for.
    pub meant: usize,
    /// Whom to ask, in this order.
    pub hops: Numbers,
    /// Of these, so many answer no worse than the one it is meant for: any of them may serve it at once.
    pub equals: usize,
    /// Why that one.
    pub why: Why,
}

/// Puts them in order; None when the request may use none of them. `floor`: the least quality that who asks accepts;
/// `dice`: from 0 to 1, the same for all requests of a session.
#[must_use]
pub fn order(candidates: &[Candidate], wish: Wish, floor: f32, dice: f32) -> Option<Order> {
    let is_tier = |number: &usize| candidates[*number].permitted && candidates[*number].replaces.is_none();
    let tiers: Numbers = (0..candidates.len()).filter(is_tier).collect();
    let best = *tiers.first()?;
    let good_enough = |number: usize| number == best || candidates[number].quality >= floor;
    let (meant, why) = match wish {
        _ if tiers.len() == 1 => (best, Why::Only),
        Wish::Full => (best, Why::Full),
        Wish::Tolerant => {
            let smallest = tiers.iter().rev().copied().find(|number| good_enough(*number));
            (smallest.unwrap_or(best), Why::Tolerant)
        }
        Wish::Routed => {
            let enough = |number: &usize| {
                let each = &candidates[*number];
                *number != best && each.expected >= each.threshold.max(floor)
            };
            match tiers.iter().rev().copied().find(enough) {
                Some(number) => (number, Why::Easy),
                None => (best, Why::Hard),
            }
        }
    };
    let at = tiers.iter().position(|tier| *tier == meant).unwrap_or_default();
    let mut equals: Numbers = tiers[..=at].iter().rev().copied().collect();
    let mut meant = meant;
    let replaced = |number: &usize| {
        let each = &candidates[*number];
        let takes = |(of, share): (usize, f32)| of == meant && dice < share;
        each.permitted && each.ready && each.replaces.is_some_and(takes)
    };
    if let Some(new) = (0..candidates.len()).find(replaced) {
        equals.insert(0, new);
        meant = new;
    }
    let falls = |number: &usize| candidates[*number].is_fallback && good_enough(*number) && !equals.contains(number);
    let mut worse: Numbers = match wish {
        Wish::Full => Numbers::new(),
        _ => tiers.iter().copied().filter(falls).collect(),
    };
    // Those that are there come first; who is not may be by then.
    let ready = |number: &usize| candidates[*number].ready;
    equals.sort_by_key(|number| !ready(number));
    worse.sort_by_key(|number| !ready(number));
    let mut hops = equals;
    let mut count = hops.len();
    if !hops.iter().any(ready) && worse.iter().any(ready) {
        count = 1;
        std::mem::swap(&mut hops, &mut worse);
    }
    hops.extend(worse);
    Some(Order {
        meant,
        hops,
        equals: count,
        why,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn one(quality: f32, expected: f32, threshold: f32) -> Candidate {
        Candidate {
            permitted: true,
            ready: true,
            quality,
            expected,
            threshold,
            is_fallback: false,
            replaces: None,
        }
    }

    fn three() -> [Candidate; 3] {
        [one(1.0, 1.0, 0.0), one(0.9, 0.8, 0.7), one(0.6, 0.5, 0.7)]
    }

    fn hops(candidates: &[Candidate], wish: Wish, floor: f32) -> (Vec<usize>, usize, Why) {
        let order = order(candidates, wish, floor, 0.5).unwrap();
        (order.hops.to_vec(), order.equals, order.why)
    }

    #[test]
    fn the_smallest_of_which_enough_is_expected_is_meant_and_better_ones_may_serve() {
        assert_eq!(hops(&three(), Wish::Routed, 0.0), (vec![1, 0], 2, Why::Easy));
        let mut easy = three();
        easy[2].expected = 0.9;
        assert_eq!(hops(&easy, Wish::Routed, 0.0), (vec![2, 1, 0], 3, Why::Easy));
        let mut hard = three();
        hard[1].expected = 0.1;
        assert_eq!(hops(&hard, Wish::Routed, 0.0), (vec![0], 1, Why::Hard));
    }

    #[test]
    fn a_wish_and_a_floor_are_respected() {
        assert_eq!(hops(&three(), Wish::Full, 0.0), (vec![0], 1, Why::Full));
        assert_eq!(hops(&three(), Wish::Tolerant, 0.0), (vec![2, 1, 0], 3, Why::Tolerant));
        assert_eq!(hops(&three(), Wish::Tolerant, 0.8), (vec![1, 0], 2, Why::Tolerant));
        assert_eq!(hops(&three(), Wish::Tolerant, 1.0), (vec![0], 1, Why::Tolerant));
        assert_eq!(hops(&three(), Wish::Routed, 0.85), (vec![0], 1, Why::Hard));
    }

    #[test]
    fn worse_ones_serve_only_as_named_fallbacks_and_never_who_wants_the_best() {
        let mut candidates = three();
        candidates[1].expected = 0.0;
        candidates[2].is_fallback = true;
        assert_eq!(hops(&candidates, Wish::Routed, 0.0), (vec![0, 2], 1, Why::Hard));
        assert_eq!(hops(&candidates, Wish::Routed, 0.7), (vec![0], 1, Why::Hard));
        assert_eq!(hops(&candidates, Wish::Full, 0.0), (vec![0], 1, Why::Full));
    }

    #[test]
    fn who_is_not_there_comes_last() {
        let mut candidates = three();
        candidates[1].ready = false;
        assert_eq!(hops(&candidates, Wish::Routed, 0.0), (vec![0, 1], 2, Why::Easy));
        candidates[1].expected = 0.0;
        (candidates[0].ready, candidates[2].is_fallback) = (false, true);
        let order = order(&candidates, Wish::Routed, 0.0, 0.5).unwrap();
        assert_eq!((order.hops.to_vec(), order.equals, order.meant), (vec![2, 0], 1, 0));
    }

    #[test]
    fn what_is_not_permitted_is_not_there() {
        let mut candidates = three();
        candidates[0].permitted = false;
        assert_eq!(hops(&candidates, Wish::Full, 0.0), (vec![1], 1, Why::Full));
        candidates[2].permitted = false;
        assert_eq!(hops(&candidates, Wish::Routed, 1.0), (vec![1], 1, Why::Only));
        candidates[1].permitted = false;
        assert_eq!(super::order(&candidates, Wish::Full, 0.0, 0.5), None);
    }

    #[test]
    fn a_new_version_takes_its_share_when_it_is_warm() {
        let mut candidates = [one(1.0, 1.0, 0.0), one(1.0, 0.0, 0.0)];
        candidates[1].replaces = Some((0, 0.25));
        let meant = |candidates: &[Candidate], dice| order(candidates, Wish::Routed, 0.0, dice).unwrap();
        let new = meant(&candidates, 0.2);
        assert_eq!((new.meant, new.hops.to_vec(), new.equals), (1, vec![1, 0], 2));
        let old = meant(&candidates, 0.3);
        assert_eq!((old.meant, old.hops.to_vec()), (0, vec![0]));
        candidates[1].ready = false;
        assert_eq!(meant(&candidates, 0.2).hops.to_vec(), vec![0]);
    }
}
