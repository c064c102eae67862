//! The main conversations, as scripts with their expected transcripts: `scenarios.txt`.

use super::*;

#[test]
fn transcripts() {
    let mut failed = Vec::new();
    for scenario in include_str!("scenarios.txt").split("\n== ").skip(1) {
        let (head, script) = scenario.split_once('\n').unwrap();
        let (name, options) = head.split_once(" [").unwrap_or((head, ""));
        let expected = script.trim_end();
        let found = play(Bench::with(with_options(options.trim_end_matches(']'))), expected);
        if found != expected {
            failed.push(format!("== {name}\nexpected\n{expected}\n\nfound\n{found}\n"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

fn with_options(options: &str) -> Policy {
    let mut policy = policy();
    for option in options.split_whitespace() {
        match option.split_once('=').unwrap() {
            ("max_queued", value) => policy.max_queued = value.parse().unwrap(),
            ("router_grace_s", value) => policy.router_grace_s = value.parse().unwrap(),
            (key, _) => panic!("unknown option {key}"),
        }
    }
    policy
}

/// Runs a script; returns it with what the core did after each line. Expected lines in it are ignored, so a script is its
/// own transcript.
fn play(mut bench: Bench, script: &str) -> String {
    let mut out = Vec::new();
    for line in script.lines().filter(|line| !line.trim_start().starts_with("->")) {
        out.push(line.to_owned());
        let done = bench.run(line);
        out.extend(
            done.iter()
                .filter_map(|action| show(&bench, action))
                .map(|text| format!("    -> {text}")),
        );
    }
    out.join("\n")
}

fn show(bench: &Bench, action: &Action) -> Option<String> {
    let name = |link: &Link, other: &str| {
        let found = bench.links.iter().find(|(_, known)| *known == link);
        found.map_or(other.to_owned(), |(name, _)| name.clone())
    };
    Some(match action {
        Action::Granted(grant) => {
            format!(
                "{} granted on {} after {} s",
                grant.ask,
                grant.worker_id,
                short(grant.queue_s)
            )
        }
        Action::Waits { ask, position, .. } => format!("{ask} waits as {position}"),
        Action::Refused(refusal) => {
            let retry = match refusal.retry_after_ms {
                0 => String::new(),
                after => format!(", retry after {after} ms"),
            };
            format!(
                "{} refused: {}: {}{retry}",
                refusal.ask,
                refusal.reason.name(),
                refusal.message
            )
        }
        Action::Paced { link, heartbeat_ms } => format!("{} reports each {heartbeat_ms} ms", name(link, "worker")),
        Action::Welcomed { link, .. } => format!("{} welcome", name(link, "worker")),
        Action::JoinRefused { message, .. } => format!("join refused: {message}"),
        Action::WorkerDropped { link, message } => format!("{} dropped: {message}", name(link, "worker")),
        Action::RouterDropped { link, message } => format!("{} dropped: {message}", name(link, "router")),
        Action::FleetChanged => return None,
        other => format!("{other:?}"),
    })
}

/// Seconds without the noise of adding them up.
fn short(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}
