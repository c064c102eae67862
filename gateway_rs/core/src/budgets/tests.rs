//! Whatever is lost, comes twice or starts again: nobody spends more than their limit, and each request is booked once.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::scheduler::events::Ask;

const MINUTE: f64 = 60.0;
/// A Unix time at a day's beginning.
const MIDNIGHT_S: f64 = 1_767_225_600.0;

fn name(text: &str) -> Arc<str> {
    Arc::from(text)
}

fn ask(booking: Booking, prompt_tokens: u32, max_tokens: u32) -> Ask {
    Ask {
        booking,
        tenant: name("acme"),
        session_id: name("s"),
        pools: vec![name("p")],
        prompt_tokens,
        max_tokens,
        ..Ask::default()
    }
}

fn settlement(booking: Booking, router: &str, prompt_tokens: u32, output_tokens: u32) -> Settlement {
    Settlement {
        booking,
        router: name(router),
        tenant: name("acme"),
        session: name("s"),
        pool: name("p"),
        placed_s: MIDNIGHT_S,
        outcome: name("stop"),
        ran: true,
        prompt_tokens,
        output_tokens,
        ..Settlement::default()
    }
}

/// Without a ledger: what is asked is answered at once.
fn budgets(limits: Limits) -> Budgets {
    let mut budgets = Budgets::new(false, false, MIDNIGHT_S);
    budgets.set_tenants(0.0, [(name("acme"), limits)]);
    budgets
}

fn refused(verdict: Verdict) -> Refused {
    match verdict {
        Verdict::No(refused) => refused,
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn a_minute_is_full_until_the_next_one() {
    let mut budgets = budgets(Limits {
        tokens_per_minute: 1000,
        ..Limits::default()
    });
    let router = name("r");
    assert_eq!(
        budgets.ask(10.0, &router, &ask(1, 100, 800), Price::default()),
        Verdict::Go
    );
    // What is held may come back at any time.
    let refusal = refused(budgets.ask(10.0, &router, &ask(2, 100, 200), Price::default()));
    assert_eq!(refusal.retry_after_ms, Some(1000));
    assert!(refusal
        .message
        .contains("tokens_per_minute: the limit is 1000; 0 are spent, 900 are held"));
    budgets.settle(11.0, settlement(1, "r", 100, 20), Price::default());
    assert_eq!(
        budgets.ask(11.0, &router, &ask(2, 100, 200), Price::default()),
        Verdict::Go
    );
    budgets.settle(12.0, settlement(2, "r", 600, 200), Price::default());
    let refusal = refused(budgets.ask(20.0, &router, &ask(3, 100, 200), Price::default()));
    assert_eq!(refusal.retry_after_ms, Some(40_000));
    assert!(refusal.message.contains("920 are spent"), "{}", refusal.message);
    assert_eq!(
        budgets.ask(60.0, &router, &ask(3, 100, 200), Price::default()),
        Verdict::Go
    );
    // What never fits is not worth a retry.
    assert_eq!(
        refused(budgets.ask(60.0, &router, &ask(4, 2000, 1), Price::default())).retry_after_ms,
        None
    );
}

#[test]
fn a_day_ends_in_shorter_answers_and_then_in_none() {
    let mut budgets = budgets(Limits {
        tokens_per_day: 1000,
        session_tokens: 900,
        ..Limits::default()
    });
    let router = name("r");
    assert_eq!(
        budgets.ask(0.0, &router, &ask(1, 100, 700), Price::default()),
        Verdict::Go
    );
    assert_eq!(budgets.allowance(1), 0);
    assert_eq!(
        budgets.ask(0.0, &router, &ask(2, 50, 700), Price::default()),
        Verdict::Go
    );
    assert_eq!(budgets.allowance(2), 50, "what is left of the session");
    budgets.settle(1.0, settlement(1, "r", 100, 700), Price::default());
    budgets.settle(1.0, settlement(2, "r", 50, 50), Price::default());
    let refusal = refused(budgets.ask(2.0, &router, &ask(3, 1, 1), Price::default()));
    assert_eq!(refusal.retry_after_ms, None);
    assert!(refusal
        .message
        .starts_with("session_tokens: the limit is 900; 900 are spent"));
    let other = Ask {
        session_id: name("t"),
        ..ask(4, 10, 500)
    };
    assert_eq!(budgets.ask(2.0, &router, &other, Price::default()), Verdict::Go);
    assert_eq!(budgets.allowance(4), 90, "what is left of the day");
    // An hour before midnight there is no hint, a minute before it there is.
    budgets.settle(
        3.0,
        Settlement {
            session: name("t"),
            ..settlement(4, "r", 10, 90)
        },
        Price::default(),
    );
    let other = Ask { booking: 5, ..other };
    assert_eq!(
        refused(budgets.ask(82_800.0, &router, &other, Price::default())).retry_after_ms,
        None
    );
    assert_eq!(
        refused(budgets.ask(86_370.0, &router, &other, Price::default())).retry_after_ms,
        Some(30_000)
    );
    assert_eq!(budgets.ask(86_400.0, &router, &other, Price::default()), Verdict::Go);
}

#[test]
fn dollars_and_requests_at_once_are_limits_too() {
    let mut budgets = budgets(Limits {
        nano_dollars_per_month: 1_000_000,
        concurrent_requests: 2,
        ..Limits::default()
    });
    let router = name("r");
    // A thousandth of a millionth dollar for a prompt token, ten times as much for one of an answer.
    let price = Price {
        prompt: 1_000_000,
        output: 10_000_000,
    };
    assert_eq!(budgets.ask(0.0, &router, &ask(1, 500, 20), price), Verdict::Go);
    assert_eq!(budgets.ask(0.0, &router, &ask(2, 100, 50), price), Verdict::Go);
    assert_eq!(
        budgets.allowance(2),
        20,
        "300,000 are left, of which the prompt takes 100,000"
    );
    let refusal = refused(budgets.ask(0.0, &router, &ask(3, 1, 1), price));
    assert_eq!(refusal.message, "concurrent_requests: the limit is 2; 2 are open");
    budgets.settle(1.0, settlement(2, "r", 100, 20), price);
    let refusal = refused(budgets.ask(1.0, &router, &ask(3, 10, 1), price));
    assert!(refusal
        .message
        .starts_with("dollars_per_month: the limit is $0.001000; $0.000300 are spent"));
    // Reused KV costs nothing, and what was held and not spent is there again.
    let cached = Settlement {
        cached_tokens: 500,
        ..settlement(1, "r", 500, 0)
    };
    budgets.settle(1.0, cached, price);
    assert_eq!(budgets.ask(1.0, &router, &ask(3, 10, 1), price), Verdict::Go);
}

/// The row that a settlement leaves, where there is a ledger.
fn row_of(said: Settlement, price: Price) -> Row {
    let mut budgets = Budgets::new(true, false, MIDNIGHT_S);
    budgets.settle(1.0, said, price);
    match budgets.take(9).front() {
        Some(Entry::Row(row)) => (**row).clone(),
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn what_levers_saved_and_what_was_charged_is_the_price_without_them() {
    let (full, own) = (
        Price {
            prompt: 3000,
            output: 40_000,
        },
        Price {
            prompt: 1000,
            output: 9000,
        },
    );
    let said = Settlement {
        cached_tokens: 64,
        best: name("full"),
        best_price: full,
        ..settlement(1, "r", 100, 20)
    };
    let replayed = Settlement {
        replayed: true,
        ..said.clone()
    };
    for (said, charged) in [(said.clone(), 36 + 180), (replayed, 0)] {
        let row = row_of(said, own);
        assert_eq!((row.nano_dollars, row.price), (charged, own));
        assert_eq!(row.variant_saved_nano_dollars, 200 + 620);
        let caches = row.prefix_saved_nano_dollars + row.answer_saved_nano_dollars;
        let whole = (row.nano_dollars + caches) as i64 + row.variant_saved_nano_dollars;
        assert_eq!(whole as u64, full.of(100, 20));
    }
    // The best one itself saves nothing, whatever its price did meanwhile; and of a price that was not measured yet, or of
    // a name of one model, nothing is known.
    let itself = Settlement {
        best: name("p"),
        ..said.clone()
    };
    assert_eq!(row_of(itself, own).variant_saved_nano_dollars, 0);
    let unknown = Settlement {
        best_price: Price::default(),
        ..said.clone()
    };
    assert_eq!(row_of(unknown, own).variant_saved_nano_dollars, 0);
    // A dearer variant saves less than nothing.
    let dearer = Settlement {
        best_price: own,
        ..said
    };
    assert_eq!(row_of(dearer, full).variant_saved_nano_dollars, -820);
}

#[test]
fn what_is_open_for_long_is_kept_where_nothing_limits_it_too() {
    let mut budgets = Budgets::new(true, false, MIDNIGHT_S);
    let router = name("r");
    assert_eq!(
        budgets.ask(0.0, &router, &ask(1, 10, 90), Price::default()),
        Verdict::Go
    );
    budgets.placed(0.0, &router, &ask(2, 10, 90), Price::default());
    budgets.placed(1.0, &router, &ask(3, 10, 90), Price::default());
    budgets.keep_long_ones(1.9);
    assert_eq!(
        budgets.take(9).len(),
        0,
        "most requests are over before, and cost the ledger nothing"
    );
    budgets.settle(1.95, settlement(2, "r", 10, 5), Price::default());
    budgets.keep_long_ones(2.0);
    budgets.keep_long_ones(2.5);
    let entries: Vec<Entry> = budgets.take(9).iter().cloned().collect();
    let [Entry::Row(row), Entry::Keep(kept)] = &entries[..] else {
        unreachable!("{entries:?}")
    };
    assert_eq!((row.of.booking, kept.booking), (2, 1));
    // Router and scheduler die: whose it was is known, and its worker tells what it gave.
    let mut next = Budgets::new(true, false, MIDNIGHT_S);
    next.restore(0.0, (**kept).clone());
    next.grows(1, 30, 4);
    next.orphaned(1.0, "r", &BTreeSet::new());
    let Some(Entry::Row(row)) = next.take(9).front() else {
        unreachable!("{next:?}")
    };
    assert_eq!(
        (&*row.of.tenant, row.of.prompt_tokens, row.of.output_tokens),
        ("acme", 10, 30)
    );
    // One that is over when it is kept is no more in the ledger either.
    budgets.done(2.6, &[Answer { first: 1, second: 0 }, Answer::default()]);
    budgets.settle(2.7, settlement(1, "r", 10, 0), Price::default());
    budgets.keep_long_ones(3.0);
    budgets.settle(
        3.1,
        Settlement {
            our_fault: true,
            ..settlement(3, "r", 10, 0)
        },
        Price::default(),
    );
    let entries: Vec<Entry> = budgets.take(9).iter().cloned().collect();
    assert!(
        matches!(&entries[..], [Entry::Row(_), Entry::Keep(_), Entry::Forget(3)]),
        "{entries:?}"
    );
}

#[test]
fn a_request_that_ran_elsewhere_too_is_one_booking() {
    let mut budgets = budgets(Limits {
        tokens_per_day: 1000,
        ..Limits::default()
    });
    let router = name("r");
    assert_eq!(
        budgets.ask(0.0, &router, &ask(1, 400, 500), Price::default()),
        Verdict::Go
    );
    // Its worker was lost after 100 ids: they are part of the next attempt's prompt.
    let again = Ask {
        committed_tokens: 100,
        ..ask(1, 500, 400)
    };
    assert_eq!(budgets.ask(0.0, &router, &again, Price::default()), Verdict::Go);
    budgets.grows(1, 30, 0);
    budgets.orphaned(1.0, "r", &BTreeSet::new());
    let key = MeterKey {
        tenant: name("acme"),
        of: Of::Day(MIDNIGHT_S as i64 / 86_400),
    };
    assert_eq!(budgets.meter(&key).unwrap().spent, 530);
    assert_eq!(budgets.open(), 0);
}

#[test]
fn limits_change_while_requests_run() {
    let mut budgets = budgets(Limits {
        tokens_per_day: 1000,
        ..Limits::default()
    });
    let router = name("r");
    assert_eq!(
        budgets.ask(0.0, &router, &ask(1, 100, 400), Price::default()),
        Verdict::Go
    );
    let limits = Limits {
        tokens_per_day: 600,
        tokens_per_minute: 5000,
        ..Limits::default()
    };
    budgets.set_tenants(1.0, [(name("acme"), limits)]);
    assert_eq!(
        budgets.ask(1.0, &router, &ask(2, 20, 400), Price::default()),
        Verdict::Go
    );
    assert_eq!(budgets.allowance(2), 80);
    budgets.set_tenants(2.0, []);
    assert_eq!(
        budgets.ask(2.0, &router, &ask(3, 10_000, 400), Price::default()),
        Verdict::Go
    );
    for booking in 1..=3 {
        budgets.settle(3.0, settlement(booking, "r", 1, 1), Price::default());
    }
    assert_eq!(budgets.open(), 0);
}

// Whatever happens.

/// Schedulers that share the limits, each with routers of its own and a ledger of its own.
struct World {
    schedulers: Vec<Scheduler>,
    drawn: BTreeMap<(MeterKey, usize), u64>,
    requests: BTreeMap<Booking, Request>,
    limits: Limits,
    now_s: f64,
}

struct Scheduler {
    budgets: Budgets,
    rows: BTreeMap<Booking, Row>,
    kept: BTreeMap<Booking, Kept>,
}

/// A request as its router and the world see it.
struct Request {
    scheduler: usize,
    router: usize,
    ask: Ask,
    placed_s: f64,
    /// Let in.
    running: bool,
    most: u32,
    emitted: u32,
    /// Its router has settled it and has not heard that this is durable.
    unheard: bool,
    over: bool,
    /// Its router died.
    lost: bool,
}

#[derive(Clone, Debug)]
enum Move {
    Ask {
        scheduler: usize,
        router: usize,
        prompt: u32,
        max_tokens: u32,
        session: usize,
    },
    Emit {
        which: usize,
        tokens: u32,
    },
    End {
        which: usize,
        heard: bool,
    },
    /// The ledger does so much, and its scheduler hears of it or dies before.
    Work {
        scheduler: usize,
        most: usize,
        heard: bool,
    },
    Restart {
        scheduler: usize,
    },
    RouterLost {
        scheduler: usize,
        router: usize,
    },
    Resend {
        scheduler: usize,
    },
    Time {
        seconds: f64,
    },
}

fn any_move() -> impl Strategy<Value = Move> {
    let (scheduler, router, which) = (0..2_usize, 0..4_usize, 0..1000_usize);
    prop_oneof![
        8 => (scheduler.clone(), router.clone(), 0..60_u32, 1..200_u32, 0..3_usize).prop_map(
            |(scheduler, router, prompt, max_tokens, session)|
                Move::Ask { scheduler, router, prompt, max_tokens, session }),
        8 => (which.clone(), 1..150_u32).prop_map(|(which, tokens)| Move::Emit { which, tokens }),
        4 => (which, any::<bool>()).prop_map(|(which, heard)| Move::End { which, heard }),
        10 => (scheduler.clone(), 1..6_usize, prop::bool::weighted(0.9)).prop_map(
            |(scheduler, most, heard)| Move::Work { scheduler, most, heard }),
        1 => scheduler.clone().prop_map(|scheduler| Move::Restart { scheduler }),
        1 => (scheduler.clone(), router).prop_map(|(scheduler, router)| Move::RouterLost { scheduler, router }),
        1 => scheduler.prop_map(|scheduler| Move::Resend { scheduler }),
        1 => proptest::sample::select(vec![0.1, 1.0, 20.0, 50.0]).prop_map(|seconds| Move::Time { seconds }),
    ]
}

impl World {
    fn new(schedulers: usize, limits: Limits) -> Self {
        let mut world = Self {
            schedulers: Vec::new(),
            drawn: BTreeMap::new(),
            requests: BTreeMap::new(),
            limits,
            now_s: 0.0,
        };
        for _ in 0..schedulers {
            let mut budgets = Budgets::new(true, schedulers > 1, MIDNIGHT_S);
            budgets.set_tenants(0.0, [(name("acme"), limits)]);
            world.schedulers.push(Scheduler {
                budgets,
                rows: BTreeMap::new(),
                kept: BTreeMap::new(),
            });
        }
        world
    }

    fn ask(&mut self, booking: Booking) {
        let request = self.requests.get_mut(&booking).unwrap();
        let scheduler = &mut self.schedulers[request.scheduler];
        match scheduler.budgets.ask(
            self.now_s,
            &name(&format!("r{}", request.router)),
            &request.ask,
            Price::default(),
        ) {
            Verdict::Go => {
                request.running = true;
                // Some wait for the ledger over a minute's end.
                request.placed_s = scheduler.budgets.placed_s(booking).unwrap() - MIDNIGHT_S;
                let allowance = scheduler.budgets.allowance(booking);
                request.most = if allowance > 0 {
                    allowance
                } else {
                    request.ask.max_tokens
                };
                scheduler.budgets.runs(booking, &name("p"), Price::default());
            }
            Verdict::Wait => {}
            Verdict::No(_) => request.over = true,
        }
    }

    /// What its router says of a request.
    fn settlement(request: &Request) -> Settlement {
        Settlement {
            session: request.ask.session_id.clone(),
            placed_s: MIDNIGHT_S + request.placed_s,
            ran: request.running,
            ..settlement(
                request.ask.booking,
                &format!("r{}", request.router),
                request.ask.prompt_tokens,
                request.emitted,
            )
        }
    }

    fn settle(&mut self, booking: Booking) {
        let request = &self.requests[&booking];
        let said = Self::settlement(request);
        self.schedulers[request.scheduler]
            .budgets
            .settle(self.now_s, said, Price::default());
    }

    fn open(&self, scheduler: usize) -> Vec<Booking> {
        let of = |(_, request): &(&Booking, &Request)| request.scheduler == scheduler && !request.over;
        self.requests.iter().filter(of).map(|(&booking, _)| booking).collect()
    }

    fn work(&mut self, number: usize, most: usize, heard: bool) {
        let scheduler = &mut self.schedulers[number];
        let entries: Vec<Entry> = scheduler.budgets.take(most).iter().cloned().collect();
        let mut answers = Vec::new();
        for entry in entries {
            let mut answer = Answer::default();
            match entry {
                Entry::Row(row) => {
                    scheduler.kept.remove(&row.of.booking);
                    scheduler.rows.entry(row.of.booking).or_insert_with(|| {
                        answer.first = 1;
                        *row
                    });
                }
                Entry::Keep(kept) => {
                    scheduler.kept.insert(kept.booking, *kept);
                }
                Entry::Forget(booking) => {
                    scheduler.kept.remove(&booking);
                }
                Entry::Look { meter, want, limit } => {
                    let counts = |row: &&Row| {
                        let second = row.of.placed_s as i64;
                        let within = meter
                            .of
                            .window_s()
                            .is_none_or(|(from, to)| (from..to).contains(&second));
                        let session = match &meter.of {
                            Of::Session(session) => *session == row.of.session,
                            _ => true,
                        };
                        within && session && meter.of != Of::Concurrent
                    };
                    answer.first = scheduler.rows.values().filter(counts).map(Row::tokens).sum();
                    let drawn = self.drawn.iter().filter(|((key, _), _)| *key == meter);
                    let total: u64 = drawn.map(|(_, drawn)| drawn).sum();
                    let own = self.drawn.entry((meter, number)).or_default();
                    *own += want.min(limit.saturating_sub(total));
                    answer.second = *own;
                }
                Entry::Return { meter, drawn } => {
                    self.drawn.insert((meter, number), drawn);
                }
            }
            answers.push(answer);
        }
        if !heard {
            self.restart(number);
            return;
        }
        let again = self.schedulers[number].budgets.done(self.now_s, &answers);
        if !again.is_empty() {
            let waiting: Vec<_> = self
                .open(number)
                .into_iter()
                .filter(|id| !self.requests[id].running)
                .collect();
            waiting.into_iter().for_each(|booking| self.ask(booking));
        }
    }

    /// The scheduler dies; the next one reads its ledger, and routers say what they have.
    fn restart(&mut self, number: usize) {
        let shared = self.schedulers.len() > 1;
        let scheduler = &mut self.schedulers[number];
        scheduler.budgets = Budgets::new(true, shared, MIDNIGHT_S);
        scheduler.budgets.set_tenants(self.now_s, [(name("acme"), self.limits)]);
        for kept in scheduler.kept.values() {
            scheduler.budgets.restore(self.now_s, kept.clone());
        }
        self.resend(number);
        self.orphan(number);
        // What waits is asked again.
        let waiting: Vec<_> = self
            .open(number)
            .into_iter()
            .filter(|id| !self.requests[id].running)
            .collect();
        waiting.into_iter().for_each(|booking| self.ask(booking));
    }

    fn resend(&mut self, number: usize) {
        let unheard = self
            .requests
            .iter()
            .filter(|(_, request)| request.scheduler == number && request.unheard);
        let unheard: Vec<_> = unheard.map(|(&booking, _)| booking).collect();
        unheard.into_iter().for_each(|booking| self.settle(booking));
    }

    fn play(&mut self, number: u64, what: Move) {
        let count = self.schedulers.len();
        let running = |world: &Self| -> Vec<Booking> {
            let of = |(_, request): &(&Booking, &Request)| request.running && !request.over;
            world.requests.iter().filter(of).map(|(&booking, _)| booking).collect()
        };
        match what {
            Move::Ask {
                scheduler,
                router,
                prompt,
                max_tokens,
                session,
            } => {
                let ask = Ask {
                    session_id: name(["", "s", "t"][session]),
                    ..ask(number + 1, prompt, max_tokens)
                };
                let request = Request {
                    scheduler: scheduler % count,
                    router,
                    ask,
                    placed_s: self.now_s,
                    running: false,
                    most: 0,
                    emitted: 0,
                    unheard: false,
                    over: false,
                    lost: false,
                };
                self.requests.insert(number + 1, request);
                self.ask(number + 1);
            }
            Move::Emit { which, tokens } => {
                let running = running(self);
                if let Some(booking) = running.get(which % running.len().max(1)) {
                    let request = self.requests.get_mut(booking).unwrap();
                    request.emitted = (request.emitted + tokens).min(request.most);
                }
            }
            Move::End { which, heard } => {
                let open: Vec<_> = (0..count).flat_map(|number| self.open(number)).collect();
                if let Some(&booking) = open.get(which % open.len().max(1)) {
                    let request = self.requests.get_mut(&booking).unwrap();
                    (request.over, request.unheard) = (true, true);
                    if heard {
                        self.settle(booking);
                    }
                }
            }
            Move::Work { scheduler, most, heard } => self.work(scheduler % count, most, heard),
            Move::Restart { scheduler } => self.restart(scheduler % count),
            Move::RouterLost { scheduler, router } => self.lose_router(scheduler % count, router),
            Move::Resend { scheduler } => self.resend(scheduler % count),
            Move::Time { seconds } => {
                self.now_s += seconds;
                for scheduler in &mut self.schedulers {
                    scheduler.budgets.give_back(self.now_s, 2.0);
                }
            }
        }
    }

    /// A router dies with all that it had; its workers say what they gave it.
    fn lose_router(&mut self, number: usize, router: usize) {
        let of = |(_, request): &(&Booking, &mut Request)| request.scheduler == number && request.router == router;
        for (_, request) in self.requests.iter_mut().filter(of) {
            if !request.over || request.unheard {
                (request.over, request.unheard, request.lost) = (true, false, true);
            }
        }
        self.orphan(number);
    }

    /// Workers tell (and each new scheduler again) what they gave to routers that died; and those do not come back.
    fn orphan(&mut self, number: usize) {
        let budgets = &mut self.schedulers[number].budgets;
        for (&booking, request) in self
            .requests
            .iter()
            .filter(|(_, request)| request.scheduler == number && request.lost)
        {
            budgets.grows(booking, request.emitted, 0);
        }
        for router in 0..4 {
            let lives = |request: &&Request| request.router == router && !request.lost;
            let kept = self.requests.values().filter(lives).map(|request| request.ask.booking);
            budgets.orphaned(self.now_s, &format!("r{router}"), &kept.collect());
        }
    }

    fn spent(&self, counts: impl Fn(&Request) -> bool) -> u64 {
        let of = |request: &&Request| request.running && counts(request);
        let cost = |request: &Request| match request.emitted {
            // Of a router that died before its first token nothing was delivered.
            0 => 0,
            emitted => u64::from(request.ask.prompt_tokens + emitted),
        };
        self.requests.values().filter(of).map(cost).sum()
    }

    fn check(&self) {
        let minutes: BTreeSet<i64> = self
            .requests
            .values()
            .map(|each| ((MIDNIGHT_S + each.placed_s) / MINUTE) as i64)
            .collect();
        for minute in minutes {
            let spent = self.spent(|request| ((MIDNIGHT_S + request.placed_s) / MINUTE) as i64 == minute);
            assert!(spent <= self.limits.tokens_per_minute, "minute {minute}: {spent}");
        }
        let spent = self.spent(|_| true);
        assert!(spent <= self.limits.tokens_per_day, "{spent}");
        for session in ["s", "t"] {
            let spent = self.spent(|request| &*request.ask.session_id == session);
            assert!(spent <= self.limits.session_tokens, "session {session}: {spent}");
        }
        {
            let drawn: BTreeMap<_, u64> = self.drawn.iter().fold(BTreeMap::new(), |mut sums, ((key, _), drawn)| {
                *sums.entry(key).or_default() += drawn;
                sums
            });
            assert!(drawn.values().all(|&drawn| drawn <= self.limits.tokens_per_day));
        }
    }

    fn finish(&mut self) {
        for number in 0..self.schedulers.len() {
            for booking in self.open(number) {
                let request = self.requests.get_mut(&booking).unwrap();
                (request.over, request.unheard) = (true, true);
            }
            self.resend(number);
            for _ in 0..1000 {
                if self.schedulers[number].budgets.behind() == 0 {
                    break;
                }
                self.work(number, 64, true);
            }
            let scheduler = &self.schedulers[number];
            assert_eq!((scheduler.budgets.behind(), scheduler.budgets.open()), (0, 0));
            assert!(scheduler.kept.is_empty(), "{:?}", scheduler.kept);
            assert!(scheduler.budgets.meters_held() == 0);
        }
        let rows = self.schedulers.iter().flat_map(|scheduler| scheduler.rows.values());
        let outputs: u64 = rows.map(|row| u64::from(row.of.output_tokens)).sum();
        let emitted: u64 = self.requests.values().map(|request| u64::from(request.emitted)).sum();
        assert_eq!(outputs, emitted, "the ledger has what was emitted");
        self.check();
    }
}

impl Budgets {
    fn meters_held(&self) -> u64 {
        self.meters().map(|meter| meter.held).sum()
    }
}

fn cases() -> u32 {
    std::env::var("HEADRACE_PROPTEST_CASES").map_or(300, |cases| cases.parse().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn nobody_overspends_and_every_request_is_booked_once(
        schedulers in 1..3_usize,
        moves in prop::collection::vec(any_move(), 1..250),
    ) {
        let limits = Limits {
            tokens_per_minute: 1200,
            tokens_per_day: 3000,
            session_tokens: 1000,
            concurrent_requests: 8,
            ..Limits::default()
        };
        let mut world = World::new(schedulers, limits);
        for (number, what) in (1..).zip(moves) {
            world.play(number, what);
            world.check();
        }
        world.finish();
    }
}
