//! One message on its way through the core: what it leads to, gathered for the streams.

use std::collections::BTreeMap;

use headrace_core::credits::{Outlook, Share};
use headrace_core::scheduler::{
    actions::{Action, Grant, Refusal},
    events::{Event, Link},
};
use prost::Message;

use super::{
    wire::{class_of, code, core_ask},
    Effects, End, Scheduler, Span, Status,
};
use crate::proto;

/// One message on its way through the core.
pub struct Step<'a> {
    pub scheduler: &'a mut Scheduler,
    now_s: f64,
    actions: Vec<Action>,
    /// Answers for each router, gathered.
    answers: BTreeMap<Link, Vec<u8>>,
    pub effects: Effects,
}

impl<'a> Step<'a> {
    pub fn new(scheduler: &'a mut Scheduler, now_s: f64) -> Self {
        Self {
            scheduler,
            now_s,
            actions: Vec::new(),
            answers: BTreeMap::new(),
            effects: Effects::default(),
        }
    }

    /// Begins the span of an ask whose trace is recorded; false when there is none.
    pub fn began(&mut self, link: Link, ask: &proto::place_request::Ask) -> bool {
        let Some(trace) = ask.trace.as_ref().filter(|trace| is_sampled(&trace.traceparent)) else {
            return false;
        };
        if !self.scheduler.traced.insert((link, ask.ask)) {
            return false;
        }
        self.effects.spans.push(Span::Began {
            link,
            ask: ask.ask,
            request_id: ask.request_id.clone(),
            class: class_of(ask.class).name(),
            prompt_tokens: ask.prompt_tokens,
            traceparent: trace.traceparent.clone(),
            tracestate: trace.tracestate.clone(),
        });
        true
    }

    pub fn ask(&mut self, link: Link, ask: proto::place_request::Ask) {
        self.began(link, &ask);
        let ask = Box::new(core_ask(self.now_s, ask));
        self.event(Event::Asked { link, ask });
    }

    pub fn placed(&mut self, link: Link, placed: proto::place_request::Placed) {
        let ask = placed.ask.unwrap_or_default();
        // The question was not asked, but its place in the trace is the same.
        if self.began(link, &ask) {
            self.scheduler.traced.remove(&(link, ask.ask));
            let worker = self.scheduler.core.fleet().workers.get(&placed.worker);
            self.effects.spans.push(Span::Granted {
                link,
                ask: ask.ask,
                worker_id: worker.map_or_else(String::new, |worker| worker.hello.worker_id.to_string()),
                queue_s: 0.0,
            });
        }
        let ask = core_ask(self.now_s, ask);
        let (counts, rank) = (&mut self.scheduler.counts, ask.class.rank());
        counts.placements[rank] += 1;
        counts.by_credit[rank] += 1;
        counts.queue_wait[rank].observe(&self.scheduler.wait_buckets_s, 0.0);
        self.event(Event::Placed {
            link,
            lease: placed.lease,
            worker: placed.worker,
            ask: Box::new(ask),
        });
    }

    /// Tells a router of a worker: a new limit, or only how it is doing.
    fn share(&mut self, router: Link, worker: Link, share: Option<Share>, outlook: Outlook) {
        let room = share.map(|share| share.room).unwrap_or_default();
        let known = self.scheduler.core.fleet().workers.get(&worker);
        let grantor = known.filter(|_| self.scheduler.named.insert((router, worker)));
        self.send_share(
            router,
            &proto::Share {
                number: share.map_or(0, |share| share.number),
                worker,
                choices: room.choices,
                kv_tokens: room.kv_tokens,
                pending_prefill_ms: outlook.pending_prefill_ms as f32,
                prefill_ms_per_token: outlook.cost.token_ms as f32,
                prefill_ms_per_pair: outlook.cost.pair_ms as f32,
                decoding: outlook.decoding,
                waiting: outlook.waiting,
                ahead_ms: outlook.ahead_ms.map(|ahead_ms| ahead_ms as f32),
                idle_ms: outlook.idle_ms.map(|idle_ms| idle_ms as f32),
                grantor: grantor.map(|worker| proto::share::Grantor {
                    worker_id: worker.hello.worker_id.to_string(),
                    instance_id: worker.hello.instance_id.to_string(),
                    address: worker.hello.address.to_string(),
                    pool: worker.hello.pool.to_string(),
                    block_tokens: worker.hello.description.block_tokens,
                }),
                gone: false,
                ask_from_tokens: outlook.ask_from_tokens,
                placed: outlook.placed,
            },
        );
    }

    fn send_share(&mut self, router: Link, share: &proto::Share) {
        // A message is the concatenation of its fields.
        prost::encoding::message::encode(3, share, self.answers.entry(router).or_default());
    }

    pub fn event(&mut self, event: Event) {
        self.scheduler.core.step(self.now_s, event, &mut self.actions);
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            self.action(action);
        }
        self.actions = actions;
    }

    fn action(&mut self, action: Action) {
        match action {
            Action::Granted(grant) => self.granted(&grant),
            Action::Refused(refusal) => self.refused(*refusal),
            Action::Waits {
                link,
                ask,
                position,
                estimate_ms,
            } => {
                let queued = proto::Queued { position, estimate_ms };
                self.answer(link, ask, proto::placement::Answer::Queued(queued));
            }
            Action::Lent { share, outlook } => self.share(share.router, share.worker, Some(share), outlook),
            Action::News { link, worker, outlook } => self.share(link, worker, None, outlook),
            Action::Unlent { link, worker } => {
                if !self.scheduler.named.remove(&(link, worker)) {
                    return;
                }
                let gone = proto::Share {
                    worker,
                    gone: true,
                    ..proto::Share::default()
                };
                self.send_share(link, &gone);
            }
            Action::FleetChanged => self.effects.fleet_changed = true,
            Action::Welcomed { link, heartbeat_ms } => {
                let name = self.worker_name(link);
                self.effects.notes.push(format!("{name} joins"));
                self.command(
                    link,
                    proto::join_response::Command::Welcome(proto::JoinWelcome { heartbeat_ms }),
                );
            }
            Action::Paced { link, heartbeat_ms } => {
                let pace = proto::SetHeartbeat { heartbeat_ms };
                self.command(link, proto::join_response::Command::SetHeartbeat(pace));
            }
            Action::SetLimits {
                link,
                limits,
                pair_tokens,
            } => {
                let limits = proto::SetLimits {
                    chunk_tokens: Some(limits.chunk_tokens),
                    batch_chunk_tokens: limits.batch_chunk_tokens,
                    batch_sequences: limits.batch_sequences,
                    slots: None,
                    pair_tokens: pair_tokens as f32,
                };
                self.command(link, proto::join_response::Command::SetLimits(limits));
            }
            Action::Settled { link, number, entries } => self.scheduler.acks.add(link, number, entries),
            Action::Preempt { link, lease } => {
                self.command(link, proto::join_response::Command::Preempt(proto::Preempt { lease }));
            }
            Action::Resume { link, lease } => {
                self.command(link, proto::join_response::Command::Resume(proto::Resume { lease }));
            }
            Action::JoinRefused {
                link,
                message,
                already_joined,
            } => {
                let status = if already_joined {
                    Status::AlreadyExists
                } else {
                    Status::InvalidArgument
                };
                self.end(link, status, message);
            }
            Action::WorkerDropped { link, message } => self.end(link, Status::Unavailable, message),
            Action::RouterDropped { link, message } => self.end(link, Status::InvalidArgument, message),
        }
    }

    fn granted(&mut self, grant: &Grant) {
        let (link, ask, rank) = (grant.link, grant.ask, grant.class.rank());
        let scheduler = &mut *self.scheduler;
        scheduler.counts.placements[rank] += 1;
        scheduler.counts.queue_wait[rank].observe(&scheduler.wait_buckets_s, grant.queue_s);
        if scheduler.traced.remove(&(link, ask)) {
            self.effects.spans.push(Span::Granted {
                link,
                ask,
                worker_id: grant.worker_id.to_string(),
                queue_s: grant.queue_s,
            });
        }
        let answer = proto::Grant {
            lease: grant.lease,
            worker_id: grant.worker_id.to_string(),
            instance_id: grant.instance_id.to_string(),
            address: grant.address.to_string(),
            token_allowance: grant.token_allowance,
            queue_s: grant.queue_s as f32,
            reason: Some(grant.why.into()),
            pool: grant.pool.to_string(),
            prefill: grant.prefill.as_ref().map(|prefill| proto::grant::Prefill {
                lease: prefill.lease,
                worker_id: prefill.worker_id.to_string(),
                instance_id: prefill.instance_id.to_string(),
                address: prefill.address.to_string(),
                kv_state_tag: prefill.kv_state_tag.to_string(),
                reason: Some(prefill.why.into()),
            }),
        };
        self.answer(link, ask, proto::placement::Answer::Grant(answer));
    }

    fn refused(&mut self, refusal: Refusal) {
        let (link, ask, reason) = (refusal.link, refusal.ask, refusal.reason.name());
        *self.scheduler.counts.rejections.entry(reason).or_default() += 1;
        if self.scheduler.traced.remove(&(link, ask)) {
            self.effects.spans.push(Span::Rejected { link, ask, reason });
        }
        let answer = proto::Error {
            code: code(refusal.reason) as i32,
            message: refusal.message,
            retryable: refusal.retryable,
            retry_after_ms: refusal.retry_after_ms,
            param: String::new(),
        };
        self.answer(link, ask, proto::placement::Answer::Rejected(answer));
    }

    fn answer(&mut self, link: Link, ask: u64, answer: proto::placement::Answer) {
        let placement = proto::Placement {
            ask,
            answer: Some(answer),
        };
        // A message is the concatenation of its fields.
        prost::encoding::message::encode(1, &placement, self.answers.entry(link).or_default());
    }

    fn command(&mut self, link: Link, command: proto::join_response::Command) {
        let message = proto::JoinResponse { command: Some(command) };
        self.effects.sends.push((link, message.encode_to_vec()));
    }

    fn end(&mut self, link: Link, status: Status, message: String) {
        let name = self.worker_name(link);
        self.effects.notes.push(format!("{name}: {message}"));
        self.effects.ends.push(End { link, status, message });
    }

    fn worker_name(&self, link: Link) -> String {
        let stream = self.scheduler.workers.get(&link);
        stream.map_or_else(|| format!("router stream {link}"), |stream| stream.name.clone())
    }

    pub fn done(mut self) -> Effects {
        let budgets = self.scheduler.core.budgets();
        self.effects.ledger = budgets.behind() > 0;
        for (link, number) in self.scheduler.acks.due(budgets.done_entries()) {
            prost::encoding::uint64::encode(4, &number, self.answers.entry(link).or_default());
        }
        self.effects.sends.extend(self.answers);
        self.effects
    }
}

/// Whether a W3C traceparent says that its trace is recorded.
fn is_sampled(traceparent: &str) -> bool {
    let flags = traceparent
        .split('-')
        .nth(3)
        .and_then(|flags| u8::from_str_radix(flags, 16).ok());
    flags.is_some_and(|flags| flags & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recorded_traces_have_spans() {
        for (traceparent, sampled) in [
            ("00-11111111111111111111111111111111-2222222222222222-01", true),
            ("00-11111111111111111111111111111111-2222222222222222-00", false),
            ("", false),
            ("nonsense", false),
        ] {
            assert_eq!(is_sampled(traceparent), sampled, "{traceparent}");
        }
    }
}
