//! Shadows: a sampled share of what a smaller variant answered is answered by the best one too, to see how far they agree.
//!
//! Only greedy requests are compared, since a drawn answer differs from itself. A shadow is batch work with a deadline of its
//! own, so it comes last and is the first to be given up; no client waits for it, no tenant pays for it, its KV is reused by
//! nobody, and its tokens are counted apart. What it compares is forgotten: kept are the agreement and, where there is a log
//! for training, the request's features.

use std::{fs::OpenOptions, future::poll_fn, io::Write as _, path::Path, sync::Arc, time::Duration, time::Instant};

use headrace_core::routing::features::Features;

use super::{
    answer::{Entry, Finish, Sink},
    generation::{Call, Generation, Step},
    log,
    metrics::{Door, VariantLabels},
    model::Model,
    open::OpenRequest,
    routes::{Alias, Route},
    Plane,
};
use crate::{
    request::{Class, Request},
    tools::CallPart,
};

/// The log is not added to when it has grown so large.
const MOST_LOG_BYTES: u64 = 256 << 20;

/// How often a shadow looks whether the router is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What is compared.
pub struct Compared {
    /// The name that was asked for.
    pub alias: Arc<Alias>,
    /// Number of the variant that answered.
    pub number: usize,
    /// As it was asked.
    pub request: Request,
    /// What was seen of it, and expected.
    pub features: Features,
    /// See `features`.
    pub expected: f32,
    /// The variant's answer.
    pub answer: String,
}

/// Compares, when it is drawn and not too many are at it; without a word to the request.
pub fn consider(plane: &Arc<Plane>, alias: &Alias, make: impl FnOnce() -> Compared) {
    let config = &alias.config;
    if config.shadow_share <= 0.0 || rand::random::<f64>() >= config.shadow_share {
        return;
    }
    {
        let mut state = alias.state();
        if state.shadows >= config.shadows_at_once {
            state.shadows_lost += 1;
            return;
        }
        state.shadows += 1;
    }
    let (plane, compared) = (plane.clone(), make());
    tokio::spawn(async move {
        let agreement = tokio::select! {
            agreement = compare(&plane, &compared) => agreement,
            () = drained(&plane) => None,
        };
        note(&plane, &compared, agreement);
    });
}

async fn drained(plane: &Plane) {
    while plane.admit().is_ok() {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The agreement; None when the best variant did not answer in time.
async fn compare(plane: &Arc<Plane>, compared: &Compared) -> Option<f32> {
    let config = &compared.alias.config;
    let now = Instant::now();
    let open = OpenRequest::new(plane, Door::Shadow, &config.name, "shadow", "", now).ok()?;
    let mut request = compared.request.clone();
    request.class = Class::Batch;
    request.stream = false;
    (request.ttft_target_ms, request.tpot_target_ms) = (None, None);
    (request.bypass_cache, request.bypass_prefix_cache) = (true, true);
    request.cache_salt = Some(format!("shadow {:032x}", rand::random::<u128>()));
    let call = Call {
        request,
        route: Route::only(compared.alias.variants[0].model.clone()),
        tenant: Arc::default(),
        request_id: format!("shadow-{:032x}", rand::random::<u128>()),
        open,
        arrived: now,
        deadline: now.checked_add(Duration::try_from_secs_f64(config.shadow_deadline_s).ok()?),
    };
    let mut generation = Generation::prepare(plane, call).await.ok()?;
    loop {
        match poll_fn(|context| generation.poll(context, &mut Nothing)).await {
            Step::More => {}
            Step::Done => {
                let text = generation.text()?;
                return Some(config.agreement.of(&compared.answer, &text));
            }
            Step::Failed(_) => return None,
        }
    }
}

fn note(plane: &Plane, compared: &Compared, agreement: Option<f32>) {
    let Compared { alias, number, .. } = compared;
    let now_s = plane.routes.now_s();
    {
        let mut state = alias.state();
        state.shadows -= 1;
        match agreement {
            Some(agreement) => {
                let moves = state.quality[*number].moves();
                state.quality[*number].observe(now_s, agreement);
                if state.quality[*number].moves() != moves {
                    let threshold = state.quality[*number].threshold(now_s);
                    let (name, model) = (&alias.config.name, &alias.variants[*number].model.name);
                    log::info(&format!("{name}: the threshold of {model} is {threshold:.3} now"));
                }
            }
            None => state.shadows_lost += 1,
        }
    }
    alias.show(&plane.metrics, now_s);
    let path = &plane.config.shadow_log;
    let Some(agreement) = agreement.filter(|_| !path.as_os_str().is_empty()) else {
        return;
    };
    let mut line = serde_json::json!({
        "unix_s": super::unix_s(), "alias": alias.config.name, "variant": alias.variants[*number].model.name,
        "features": compared.features, "expected": compared.expected, "agreement": agreement,
    });
    if plane.config.telemetry.log_content {
        line["answer"] = compared.answer.clone().into();
    }
    let path = path.clone();
    // A disk may be slow; streams must not wait for it.
    tokio::task::spawn_blocking(move || {
        if let Err(error) = append(&path, &format!("{line}\n")) {
            log::warn(&format!("router.shadow_log: {}: {error}", path.display()));
        }
    });
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    match file.metadata()?.len() < MOST_LOG_BYTES {
        true => file.write_all(line.as_bytes()),
        false => Ok(()),
    }
}

/// Labels of a variant's series.
pub fn labels(alias: &Alias, number: usize) -> VariantLabels {
    VariantLabels {
        model: alias.config.name.clone(),
        variant: alias.variants[number].model.name.clone(),
    }
}

/// A sink that keeps nothing: the answer's ids are what is compared.
struct Nothing;

impl Sink for Nothing {
    fn prompt(&mut self, _: u32, _: &[Entry]) {}

    fn delta(&mut self, _: u32, _: &str, _: &[Entry]) {}

    fn calls(&mut self, _: u32, _: &[CallPart]) {}

    fn finish(&mut self, _: u32, _: &Finish) {}

    fn model(&mut self, _: &Arc<Model>) {}
}
