//! Which worker takes a request: rules that score the candidates, all pure.
//!
//! The caller lists who *can* take it (healthy, with room, not avoided) and what each is believed to hold; a [`Policy`] says
//! whom to prefer. Ties are drawn by a generator that is handed in: whoever breaks them by order sends every miss to the
//! first worker.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use rand::{Rng, RngCore};

/// What is believed of one worker, for one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Predicted work of prompts that it has and hasn't computed yet.
    pub pending_prefill_ms: f64,
    /// Those prompts' tokens.
    pub pending_prefill_tokens: u64,
    /// Predicted work of this request's prompt there.
    pub prefill_ms: f64,
    /// Of that, what another candidate has done: here it would be computed once more.
    pub copy_ms: f64,
    /// For how long it has had nothing at all to do.
    pub idle_ms: f64,
    /// This request's prompt tokens that it holds in KV.
    pub hit_tokens: u32,
    /// Requests that decode.
    pub decoding: u32,
    /// Requests that wait or whose prompt is partly computed.
    pub waiting: u32,
    /// Requests beside these that give way to this one.
    pub gives_way: u32,
    /// KV tokens that its requests hold.
    pub active_tokens: u64,
    /// KV tokens that it keeps for reuse.
    pub cached_tokens: u64,
}

impl Candidate {
    fn requests(&self) -> f64 {
        f64::from(self.decoding) + f64::from(self.waiting) + f64::from(self.gives_way)
    }
}

/// Why a worker was chosen: what was believed of it then, and its score.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Why {
    /// Prompt tokens that it was believed to hold.
    pub hit_tokens: u32,
    /// Predicted work of the rest.
    pub prefill_ms: f64,
    /// Predicted work of prompts before it.
    pub pending_prefill_ms: f64,
    /// Requests that decoded.
    pub decoding: u32,
    /// Requests that waited.
    pub waiting: u32,
    /// Requests beside these that gave way to it.
    pub gives_way: u32,
    /// By the rule; the lowest wins.
    pub score: f64,
}

impl Why {
    /// Of the chosen one.
    #[must_use]
    pub fn new(chosen: &Candidate, score: f64) -> Self {
        Self {
            hit_tokens: chosen.hit_tokens,
            prefill_ms: chosen.prefill_ms,
            pending_prefill_ms: chosen.pending_prefill_ms,
            decoding: chosen.decoding,
            waiting: chosen.waiting,
            gives_way: chosen.gives_way,
            score,
        }
    }
}

/// [`Candidate::copy_ms`] of a worker that holds so many tokens of a prompt, where another candidate holds `most_tokens`.
/// `work_ms`: the work of the prompt behind that many.
pub fn copy_ms(work_ms: impl Fn(u32) -> f64, hit_tokens: u32, most_tokens: u32) -> f64 {
    if most_tokens > hit_tokens {
        (work_ms(hit_tokens) - work_ms(most_tokens)).max(0.0)
    } else {
        0.0
    }
}

/// What the rules ask of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Length of its prompt.
    pub prompt_tokens: u32,
    /// Predicted work of [`charged_tokens`] prompt tokens.
    pub block_ms: f64,
}

/// The block that [`Policy::MarginalDelay`] charges at most on top of each prompt, and that [`Policy::Dynamo`] counts in.
pub const BLOCK_TOKENS: u32 = 512;

/// What [`Policy::MarginalDelay`] charges on top of a prompt: a block, but no more than a quarter of the prompt. A whole
/// block on a prompt of little more than one would hide what a worker that holds nearly all of it saves: prompts of 544
/// tokens with 512 in common then went wherever a request less was running, and were computed anew on every worker.
#[must_use]
pub fn charged_tokens(prompt_tokens: u32) -> u32 {
    BLOCK_TOKENS.min(prompt_tokens.div_ceil(4))
}

/// What the work of a second copy counts in [`Policy::MarginalDelay`], beside the delay of those who are there: it takes
/// time from whoever comes next, and KV from what would be asked for again. Without it a worker with little to do for a
/// moment took what others hold, and beginnings were soon computed on every worker. What a worker had the time for while
/// it was idle costs nobody anything, so a beginning that many ask for still spreads to those who have nothing to do.
pub const COPY_PRICE: f64 = 16.0;

/// [`factor`] of a worker that has nobody.
pub const NOBODY: u64 = 64;

/// By how many 64ths a prompt's work counts at a worker that has so many decoding and waiting requests, each of which it
/// delays, and so many that give way to it. Their delay is worth little, and they cost it next to nothing: it is computed
/// before them, and what they take of later steps is bounded. Counted like the others, batch work had interactive prompts
/// queue behind one another at the worker that had a little less of it.
pub fn factor(decoding: u32, waiting: u32, gives_way: u32) -> u64 {
    let others = (1 + u64::from(decoding)) * (1 + u64::from(waiting));
    others.saturating_mul(NOBODY + u64::from(gives_way))
}

/// How to choose.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Policy {
    /// The request's own wait, the delay that its prompt puts on those who are there, and what a copy costs those to come:
    /// P + (N + c) (1 + R) (1 + W) (1 + B/64) + 16 max(0, M - I), in predicted ms. P pending prefill, N this request's, R
    /// decoding, W waiting, B what gives way to it, which is in none of these ([`factor`]), c a block or a quarter of the
    /// prompt ([`charged_tokens`]), which keeps fully cached prompts from piling up, M the part of N that is done elsewhere,
    /// I for how long the worker has been idle ([`COPY_PRICE`]).
    #[default]
    MarginalDelay,
    /// LMetric (arXiv 2603.15202): tokens to prefill there, its own and those that wait, times requests there.
    LMetric,
    /// Each in turn.
    RoundRobin,
    /// Fewest requests.
    LeastRequests,
    /// Fewest tokens held and still to be computed.
    LeastTokens,
    /// The one with fewer requests of two that are drawn.
    PowerOfTwo,
    /// vLLM's internal balancer (v1): four times the waiting plus the running.
    VllmV1,
    /// The first token soonest: P + N.
    PredictedTtft,
    /// SMG's (SGLang's) cache-aware rule: the longest match if it is over three tenths of the prompt, else who keeps the
    /// least; fewest requests while loads differ by more than `gap` and by half.
    Smg {
        /// Requests between the most and the least loaded.
        gap: u32,
    },
    /// The cost of Dynamo's KV router at temperature 0: blocks to prefill there plus blocks its requests hold.
    Dynamo,
    /// Preble's, in short: the longest match when more than half is cached and it isn't far behind; else the first token
    /// soonest.
    Preble,
}

impl Policy {
    /// SMG's default gap.
    pub const SMG_GAP: u32 = 64;

    /// Every rule, as configured by default.
    pub const ALL: [Self; 11] = [
        Self::MarginalDelay,
        Self::LMetric,
        Self::RoundRobin,
        Self::LeastRequests,
        Self::LeastTokens,
        Self::PowerOfTwo,
        Self::VllmV1,
        Self::PredictedTtft,
        Self::Smg { gap: Self::SMG_GAP },
        Self::Dynamo,
        Self::Preble,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::MarginalDelay => "marginal_delay",
            Self::LMetric => "lmetric",
            Self::RoundRobin => "round_robin",
            Self::LeastRequests => "least_requests",
            Self::LeastTokens => "least_tokens",
            Self::PowerOfTwo => "power_of_two",
            Self::VllmV1 => "vllm_v1",
            Self::PredictedTtft => "predicted_ttft",
            Self::Smg { .. } => "smg",
            Self::Dynamo => "dynamo",
            Self::Preble => "preble",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Smg { gap } if *gap != Self::SMG_GAP => write!(out, "smg:{gap}"),
            _ => out.write_str(self.name()),
        }
    }
}

/// No rule has that name.
#[derive(Debug, thiserror::Error)]
#[error("no placement policy {name}; there are {known} (smg:GAP sets its gap)")]
pub struct UnknownPolicy {
    name: String,
    known: String,
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        if let Some(gap) = name.strip_prefix("smg:").and_then(|gap| gap.parse().ok()) {
            return Ok(Self::Smg { gap });
        }
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownPolicy {
                name: name.to_owned(),
                known: Self::ALL.map(Self::name).join(", "),
            })
    }
}

/// A rule and what it remembers.
#[derive(Clone, Debug, Default)]
pub struct Placer {
    policy: Policy,
    turn: usize,
}

impl Placer {
    /// Places by that rule.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self { policy, turn: 0 }
    }

    /// The rule.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The place in the list of the candidate to take; None of an empty list.
    pub fn choose(&mut self, request: &Request, candidates: &[Candidate], rng: &mut dyn RngCore) -> Option<usize> {
        if candidates.len() < 2 {
            return (!candidates.is_empty()).then_some(0);
        }
        match self.policy {
            Policy::RoundRobin => {
                self.turn = self.turn.wrapping_add(1);
                Some(self.turn % candidates.len())
            }
            Policy::PowerOfTwo => Some(two_choices(candidates, rng)),
            Policy::Smg { gap } => cache_aware(gap, request, candidates, rng),
            Policy::Preble => explore_or_exploit(request, candidates, rng),
            _ => least(candidates, rng, |each| self.score(request, each)),
        }
    }

    /// What a rule that scores gives one candidate, lower being better; the rules that don't score give its requests.
    #[must_use]
    pub fn score(&self, request: &Request, each: &Candidate) -> f64 {
        let (running, waiting) = (f64::from(each.decoding), f64::from(each.waiting));
        let missing = f64::from(request.prompt_tokens.saturating_sub(each.hit_tokens));
        match self.policy {
            Policy::MarginalDelay => {
                let factor = factor(each.decoding, each.waiting, each.gives_way) as f64 / NOBODY as f64;
                let delay_ms = (each.prefill_ms + request.block_ms) * factor;
                each.pending_prefill_ms + delay_ms + COPY_PRICE * (each.copy_ms - each.idle_ms).max(0.0)
            }
            // One more, so that a full hit doesn't make all loads equal.
            Policy::LMetric => (each.pending_prefill_tokens as f64 + missing + 1.0) * (running + waiting + 1.0),
            Policy::VllmV1 => 4.0 * waiting + running,
            Policy::PredictedTtft => each.pending_prefill_ms + each.prefill_ms,
            Policy::LeastTokens => each.active_tokens as f64 + each.pending_prefill_tokens as f64,
            Policy::Dynamo => {
                (each.pending_prefill_tokens as f64 + missing + each.active_tokens as f64) / f64::from(BLOCK_TOKENS)
            }
            Policy::RoundRobin | Policy::LeastRequests | Policy::PowerOfTwo | Policy::Smg { .. } | Policy::Preble => {
                each.requests()
            }
        }
    }
}

/// The candidate with the lowest score, by lot among equals.
fn least(candidates: &[Candidate], rng: &mut dyn RngCore, score: impl Fn(&Candidate) -> f64) -> Option<usize> {
    let mut best = None;
    let mut lowest = f64::INFINITY;
    let mut equals = 0_u32;
    for (at, each) in candidates.iter().enumerate() {
        let score = score(each);
        // What is no number is never preferred, but taken when there is nothing else.
        match score.partial_cmp(&lowest) {
            Some(Ordering::Less) => (best, lowest, equals) = (Some(at), score, 1),
            Some(Ordering::Equal) => {
                equals += 1;
                if rng.random_range(0..equals) == 0 {
                    best = Some(at);
                }
            }
            _ if best.is_none() => best = Some(at),
            _ => {}
        }
    }
    best
}

fn two_choices(candidates: &[Candidate], rng: &mut dyn RngCore) -> usize {
    let first = rng.random_range(0..candidates.len());
    let second = (first + rng.random_range(1..candidates.len())) % candidates.len();
    if candidates[second].requests() < candidates[first].requests() {
        second
    } else {
        first
    }
}

/// Share of the prompt that has to match.
const SMG_MATCH: f64 = 0.3;

/// The most loaded has to hold so many times as much as the least, besides the gap.
const SMG_RATIO: f64 = 1.5;

fn cache_aware(gap: u32, request: &Request, candidates: &[Candidate], rng: &mut dyn RngCore) -> Option<usize> {
    let loads = candidates.iter().map(Candidate::requests);
    let most = loads.clone().fold(0.0, f64::max);
    let fewest = loads.fold(f64::INFINITY, f64::min);
    if most - fewest > f64::from(gap) && most > SMG_RATIO * fewest {
        return least(candidates, rng, Candidate::requests);
    }
    let longest = candidates.iter().map(|each| each.hit_tokens).max().unwrap_or(0);
    if f64::from(longest) > SMG_MATCH * f64::from(request.prompt_tokens) {
        return least(candidates, rng, |each| -f64::from(each.hit_tokens));
    }
    least(candidates, rng, |each| each.cached_tokens as f64)
}

/// A match may cost so many times the best wait, and so many ms, more.
const PREBLE_RATIO: f64 = 2.0;
const PREBLE_SLACK_MS: f64 = 500.0;

fn explore_or_exploit(request: &Request, candidates: &[Candidate], rng: &mut dyn RngCore) -> Option<usize> {
    let wait_ms = |each: &Candidate| each.pending_prefill_ms + each.prefill_ms;
    let longest = candidates.iter().map(|each| each.hit_tokens).max().unwrap_or(0);
    if 2 * u64::from(longest) > u64::from(request.prompt_tokens) {
        let matching = |each: &Candidate| {
            if each.hit_tokens == longest {
                wait_ms(each)
            } else {
                f64::INFINITY
            }
        };
        let exploit = least(candidates, rng, matching)?;
        let best_ms = candidates.iter().map(wait_ms).fold(f64::INFINITY, f64::min);
        if wait_ms(&candidates[exploit]) <= PREBLE_RATIO * best_ms + PREBLE_SLACK_MS {
            return Some(exploit);
        }
    }
    least(candidates, rng, wait_ms)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::SeedableRng;

    use super::*;
    use crate::cost::{CostModel, CostTable};

    fn model() -> CostModel {
        CostModel::new(Some(CostTable::named("a100-llama3-8b").expect("built in").into()))
    }

    fn request(prompt_tokens: u32) -> Request {
        Request {
            prompt_tokens,
            block_ms: model().prefill_ms(charged_tokens(prompt_tokens), 0),
        }
    }

    /// An idle worker that holds so much of the prompt.
    fn idle(prompt_tokens: u32, hit_tokens: u32) -> Candidate {
        Candidate {
            prefill_ms: model().prefill_ms(prompt_tokens - hit_tokens, hit_tokens),
            hit_tokens,
            ..Candidate::default()
        }
    }

    fn any_candidate() -> impl Strategy<Value = Candidate> {
        // Few values each, so that ties are common.
        let few = || 0_u32..4;
        (few(), few(), few(), few(), few(), 0_u64..4, 0_u64..4).prop_map(
            |(pending, hit_blocks, decoding, waiting, gives_way, active, cached)| Candidate {
                pending_prefill_ms: f64::from(pending) * 50.0,
                pending_prefill_tokens: u64::from(pending) * 700,
                hit_tokens: hit_blocks * BLOCK_TOKENS,
                prefill_ms: f64::from(4 - hit_blocks) * 36.0,
                copy_ms: f64::from(3 - hit_blocks) * 36.0,
                idle_ms: 0.0,
                decoding,
                waiting,
                gives_way,
                active_tokens: active * 1000,
                cached_tokens: cached * 1000,
            },
        )
    }

    #[test]
    fn names_are_read_back() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse::<Policy>().expect("known"), policy);
        }
        assert_eq!("smg:8".parse::<Policy>().expect("known"), Policy::Smg { gap: 8 });
        let error = "fastest".parse::<Policy>().expect_err("unknown").to_string();
        assert!(error.contains("fastest") && error.contains("lmetric"), "{error}");
        assert!("smg:many".parse::<Policy>().is_err());
    }

    #[test]
    fn a_miss_spreads_over_equal_workers_by_every_rule() {
        for policy in Policy::ALL {
            let (mut placer, mut rng) = (Placer::new(policy), StdRng::seed_from_u64(1));
            let mut taken = [0; 4];
            for _ in 0..400 {
                taken[placer
                    .choose(&request(3000), &[idle(3000, 0); 4], &mut rng)
                    .expect("some")] += 1;
            }
            assert!(
                taken.iter().all(|count| (60..140).contains(count)),
                "{policy}: {taken:?}"
            );
        }
    }

    #[test]
    fn fully_cached_prompts_do_not_pile_up_on_one_worker() {
        let mut placer = Placer::new(Policy::MarginalDelay);
        let mut rng = StdRng::seed_from_u64(1);
        let holder = Candidate {
            decoding: 200,
            ..idle(512, 512)
        };
        assert_eq!(placer.choose(&request(512), &[holder, idle(512, 0)], &mut rng), Some(1));
    }

    #[test]
    fn what_a_short_prompt_saves_counts() {
        let mut placer = Placer::new(Policy::MarginalDelay);
        let mut rng = StdRng::seed_from_u64(1);
        let with = |decoding, hit_tokens| Candidate {
            decoding,
            ..idle(544, hit_tokens)
        };
        assert_eq!(
            placer.choose(&request(544), &[with(4, 512), with(2, 0)], &mut rng),
            Some(0)
        );
        // Its decoding is worth more than that in the end.
        assert_eq!(
            placer.choose(&request(544), &[with(9, 512), with(0, 0)], &mut rng),
            Some(1)
        );
    }

    #[test]
    fn a_copy_is_made_by_who_had_the_time_for_it() {
        let mut placer = Placer::new(Policy::MarginalDelay);
        let mut rng = StdRng::seed_from_u64(1);
        let holder = Candidate {
            decoding: 12,
            ..idle(4096, 3584)
        };
        let copy_ms = idle(4096, 0).prefill_ms - holder.prefill_ms;
        let mut choose = |idle_ms| {
            let other = Candidate {
                copy_ms,
                idle_ms,
                ..idle(4096, 0)
            };
            placer.choose(&request(4096), &[holder, other], &mut rng)
        };
        assert_eq!(
            (choose(0.0), choose(copy_ms / 2.0), choose(copy_ms)),
            (Some(0), Some(0), Some(1))
        );
    }

    #[test]
    fn no_candidate_no_choice() {
        let mut rng = StdRng::seed_from_u64(1);
        for policy in Policy::ALL {
            assert_eq!(Placer::new(policy).choose(&request(10), &[], &mut rng), None);
        }
    }

    #[test]
    fn smg_turns_to_the_shortest_queue_when_loads_part() {
        let busy = Candidate {
            decoding: 20,
            ..idle(3000, 2560)
        };
        let mut rng = StdRng::seed_from_u64(1);
        let mut choose =
            |gap| Placer::new(Policy::Smg { gap }).choose(&request(3000), &[busy, idle(3000, 0)], &mut rng);
        assert_eq!((choose(64), choose(8)), (Some(0), Some(1)));
    }

    proptest! {
        /// A hit of a block, or of a quarter of a short prompt, never beats a worker that has long been idle, whatever else
        /// the holder does.
        #[test]
        fn a_small_hit_never_beats_an_idle_worker(
            prompt in 2_u32..20_000, pending_ms in 0.0_f64..1e4, decoding in 0_u32..256, waiting in 0_u32..256,
            seed in any::<u64>(),
        ) {
            prop_assume!(decoding + waiting > 0);
            let mut placer = Placer::new(Policy::MarginalDelay);
            let pending_prefill_ms = if waiting > 0 { pending_ms + 1.0 } else { pending_ms };
            let busy = Candidate { pending_prefill_ms, decoding, waiting, ..idle(prompt, charged_tokens(prompt)) };
            let mut rng = StdRng::seed_from_u64(seed);
            let copy_ms = idle(prompt, 0).prefill_ms - busy.prefill_ms;
            let rested = Candidate { copy_ms, idle_ms: copy_ms, ..idle(prompt, 0) };
            prop_assert_eq!(placer.choose(&request(prompt), &[busy, rested], &mut rng), Some(1));
        }

        /// The same seed gives the same choices.
        #[test]
        fn the_seed_decides(candidates in prop::collection::vec(any_candidate(), 1..12), seed in any::<u64>()) {
            for policy in Policy::ALL {
                let run = || {
                    let (mut placer, mut rng) = (Placer::new(policy), StdRng::seed_from_u64(seed));
                    (0..8).map(|_| placer.choose(&request(2048), &candidates, &mut rng)).collect::<Vec<_>>()
                };
                prop_assert_eq!(run(), run());
            }
        }

        /// A rule that scores takes one of the lowest, and each of them now and then.
        #[test]
        fn the_lowest_score_wins(candidates in prop::collection::vec(any_candidate(), 2..6), seed in any::<u64>()) {
            use Policy::{Dynamo, LMetric, LeastRequests, LeastTokens, MarginalDelay, PredictedTtft, VllmV1};
            for policy in [MarginalDelay, LMetric, LeastRequests, LeastTokens, VllmV1, PredictedTtft, Dynamo] {
                let (mut placer, mut rng) = (Placer::new(policy), StdRng::seed_from_u64(seed));
                let scores: Vec<f64> = candidates.iter().map(|each| placer.score(&request(2048), each)).collect();
                let lowest = scores.iter().copied().fold(f64::INFINITY, f64::min);
                let mut missing: Vec<usize> = (0..scores.len()).filter(|&at| scores[at] == lowest).collect();
                for _ in 0..200 {
                    let chosen = placer.choose(&request(2048), &candidates, &mut rng).expect("some");
                    prop_assert_eq!(scores[chosen], lowest);
                    missing.retain(|&at| at != chosen);
                }
                prop_assert!(missing.is_empty(), "{}: never took {:?}", policy, missing);
            }
        }

        /// No rule prefers what is no number, and none fails on it.
        #[test]
        fn nonsense_is_never_preferred(at in 0_usize..3, seed in any::<u64>()) {
            let mut candidates = [idle(2048, 0); 3];
            candidates[at].prefill_ms = f64::NAN;
            for policy in [Policy::MarginalDelay, Policy::PredictedTtft] {
                let mut rng = StdRng::seed_from_u64(seed);
                prop_assert_ne!(Placer::new(policy).choose(&request(2048), &candidates, &mut rng), Some(at));
            }
            let all = [candidates[at]; 2];
            let chosen = Placer::new(Policy::MarginalDelay).choose(&request(2048), &all, &mut StdRng::seed_from_u64(seed));
            prop_assert!(chosen.is_some());
        }
    }
}
