//! The bookings, and the one rule by which they are let in, held and settled.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use super::{
    meters::{meters_of, Meter, MeterKey, Of},
    prices::Price,
    Answer, Booking, Entry, Limits, Refused, Tenant,
};
use crate::scheduler::{
    events::{Ask, Class},
    map::Map,
};

/// A request is not let in for a shorter answer than this (or the one that it asks for): it would end before it said
/// anything.
const LEAST_ANSWER_TOKENS: u64 = 16;

/// Of a minute's tokens, a request waits for at least this part rather than be cut short: the next minute is near.
const MINUTE_PART: u64 = 4;

/// Answers whose length was not said.
const UNSAID_ANSWER_TOKENS: u64 = 4096;

/// Room that comes back within so long is worth waiting for.
const SOON_S: f64 = 60.0;

/// Room that open requests hold may come back at any moment.
const HELD_RETRY_MS: u32 = 1000;

/// A scheduler draws at least so much of what is left: one part of so many of the limit.
const DRAW_PARTS: u64 = 64;

/// The shared store, having had too little, is asked again after so long.
const SHORT_S: f64 = 0.2;

/// Meters kept. Sessions that nobody uses now are looked up again when they are.
const MAX_METERS: usize = 100_000;

/// Bookings that need not be durable are kept when they have been open for so long: most are over before.
const YOUNG_S: f64 = 2.0;

/// What an ask is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may go on.
    Go,
    /// The ledger has to be asked, or to write, first: ask again when it has.
    Wait,
    /// There is no room.
    No(Refused),
}

/// What a request cost, in the end. By its router; whole, so that it can be booked by a scheduler that never heard of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settlement {
    /// Its entry.
    pub booking: Booking,
    /// Who says so.
    pub router: Arc<str>,
    /// For people.
    pub request_id: Arc<str>,
    /// Whose.
    pub tenant: Tenant,
    /// The conversation it belongs to; empty = none.
    pub session: Arc<str>,
    /// The model, as the client named it.
    pub alias: Arc<str>,
    /// The pool that it ran in.
    pub pool: Arc<str>,
    /// The pool of the best variant of the name that was asked for; empty = it was not a name of several.
    pub best: Arc<str>,
    /// What tokens cost there now.
    pub best_price: Price,
    /// Nobody asked for it: it measures how far a variant agrees with the best one.
    pub shadow: bool,
    /// Its class.
    pub class: Class,
    /// Unix time when it was asked for.
    pub placed_s: f64,
    /// How it ended; a name of the closed list.
    pub outcome: Arc<str>,
    /// It ended for a reason of ours and not of its client.
    pub our_fault: bool,
    /// A worker was asked to run it.
    pub ran: bool,
    /// It was answered from the response cache.
    pub replayed: bool,
    /// Ids of its prompt.
    pub prompt_tokens: u32,
    /// Of these, whose KV was reused.
    pub cached_tokens: u32,
    /// Ids of all choices that reached its router and count.
    pub output_tokens: u32,
    /// Ids that came and were thrown away by starting again.
    pub wasted_tokens: u32,
    /// In the scheduler's queue.
    pub queue_s: f64,
    /// From the ask to the first token; 0 = none came.
    pub ttft_s: f64,
    /// From the first token to the last.
    pub decode_s: f64,
    /// KV blocks held, times seconds.
    pub kv_block_s: f64,
}

/// A row of the ledger: one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// What its router said; prompt and cached tokens are those that are charged.
    pub of: Settlement,
    /// Charged.
    pub nano_dollars: u64,
    /// Saved because KV was reused.
    pub prefix_saved_nano_dollars: u64,
    /// Of an answer from the response cache: what was not computed.
    pub replayed_prompt_tokens: u32,
    /// And of its answer.
    pub replayed_output_tokens: u32,
    /// And what that saved.
    pub answer_saved_nano_dollars: u64,
    /// What all its tokens would have cost in the pool of the best variant, less what they cost in its own: with what the
    /// caches saved and what was charged, this is the price of the same tokens without any lever.
    pub variant_saved_nano_dollars: i64,
    /// What a token cost.
    pub price: Price,
}

impl Row {
    /// Counted against the tenant's tokens.
    pub fn tokens(&self) -> u64 {
        u64::from(self.of.prompt_tokens) + u64::from(self.of.output_tokens)
    }
}

/// An open booking, as it is kept for the next start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    /// Its number.
    pub booking: Booking,
    /// Who opened it.
    pub router: Arc<str>,
    /// For people.
    pub request_id: Arc<str>,
    /// Whose.
    pub tenant: Tenant,
    /// Its session.
    pub session: Arc<str>,
    /// The model, as the client named it.
    pub alias: Arc<str>,
    /// The first pool that it was asked for.
    pub pool: Arc<str>,
    /// Its class.
    pub class: Class,
    /// Unix time.
    pub placed_s: f64,
    /// Ids of its prompt.
    pub prompt_tokens: u32,
    /// It may have so many tokens, prompt and answer.
    pub tokens: u64,
    /// And cost so much.
    pub nano_dollars: u64,
    /// What its router was told of that: 0 = nothing.
    pub allowance: u32,
    /// At that price.
    pub price: Price,
}

#[derive(Clone, Debug)]
struct Open {
    kept: Kept,
    /// Durable, or need not be.
    durable: bool,
    /// A row or a note of it is, or will be, in the ledger.
    noted: bool,
    /// What it holds on its meters.
    meters: Vec<MeterKey>,
    slot: u64,
    /// Of the prompt of its last ask, what is its own answer.
    committed_tokens: u32,
    /// As far as is known without its router.
    output_tokens: u32,
    cached_tokens: u32,
    ran: bool,
    /// Its row is on the way to the ledger: done when that many entries are.
    settled: Option<u64>,
}

impl Open {
    fn holds(&self, of: &Of) -> u64 {
        match of {
            Of::Concurrent => self.slot,
            Of::Month(_) => self.kept.nano_dollars,
            Of::Minute(_) | Of::Day(_) | Of::Session(_) => self.kept.tokens,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Limited {
    limits: Limits,
    /// Unix time since when these are in force.
    since_s: f64,
}

/// All bookings and meters.
#[derive(Debug, Default)]
pub struct Budgets {
    /// There is a ledger.
    keeps: bool,
    /// Limits are shared with other schedulers.
    shared: bool,
    /// Unix time, less the driver's.
    unix_offset_s: f64,
    tenants: Map<Tenant, Limited>,
    meters: Map<MeterKey, Meter>,
    open: Map<Booking, Open>,
    /// Those of tenants without limits that are not kept yet, and since when they are open; in that order.
    young: VecDeque<(f64, Booking)>,
    by_router: BTreeMap<Arc<str>, BTreeSet<Booking>>,
    entries: VecDeque<Entry>,
    taken: VecDeque<Entry>,
    pushed: u64,
    done: u64,
    swept_minute: i64,
}

impl Budgets {
    /// `keeps`: there is a ledger, whose entries are taken; otherwise nothing is remembered over a start. `shared`: limits
    /// are drawn from a store. `unix_offset_s`: Unix time, less the driver's.
    pub fn new(keeps: bool, shared: bool, unix_offset_s: f64) -> Self {
        Self {
            keeps,
            shared: shared && keeps,
            unix_offset_s,
            ..Self::default()
        }
    }

    /// Sets all tenants' limits. Those that did not change stay as they are.
    pub fn set_tenants(&mut self, now_s: f64, limits: impl IntoIterator<Item = (Tenant, Limits)>) {
        let since_s = self.unix_s(now_s);
        let fresh: Map<Tenant, Limits> = limits.into_iter().filter(|(_, limits)| limits.any()).collect();
        let mut changed: BTreeSet<Tenant> = self
            .tenants
            .keys()
            .filter(|name| !fresh.contains_key(*name))
            .cloned()
            .collect();
        for (name, limits) in fresh {
            if self.tenants.get(&name).is_none_or(|before| before.limits != limits) {
                changed.insert(name.clone());
                self.tenants.insert(name, Limited { limits, since_s });
            } else {
                changed.remove(&name);
            }
        }
        self.tenants
            .retain(|name, limited| limited.since_s == since_s || !changed.contains(name));
        if changed.is_empty() {
            return;
        }
        // Meters begin anew, with what is open; what was spent is looked up.
        self.meters.retain(|key, _| !changed.contains(&key.tenant));
        let open = self.open.iter().filter(|(_, open)| changed.contains(&open.kept.tenant));
        let bookings: Vec<_> = open.map(|(&booking, _)| booking).collect();
        for booking in bookings {
            self.measure(now_s, booking);
        }
    }

    /// Whether a tenant has limits.
    pub fn limits(&self, tenant: &str) -> Option<&Limits> {
        self.tenants.get(tenant).map(|limited| &limited.limits)
    }

    /// Open bookings, for metrics.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Entries that are not done, for metrics.
    pub fn behind(&self) -> usize {
        self.entries.len() + self.taken.len()
    }

    fn unix_s(&self, now_s: f64) -> f64 {
        now_s + self.unix_offset_s
    }

    // Opening.

    /// Whether a request may go on to be placed. Opens its booking, or finds it open. `price`: the most that a token costs
    /// where it may run.
    pub fn ask(&mut self, now_s: f64, router: &Arc<str>, ask: &Ask, price: Price) -> Verdict {
        if ask.booking == 0 {
            return Verdict::Go;
        }
        if let Some(open) = self.open.get_mut(&ask.booking) {
            if open.settled.is_some() {
                return Verdict::No(Refused {
                    message: "the request has ended already".to_owned(),
                    retry_after_ms: None,
                });
            }
            open.committed_tokens = open.committed_tokens.max(ask.committed_tokens);
            return if open.durable { Verdict::Go } else { Verdict::Wait };
        }
        let prompt = u64::from(ask.prompt_tokens.saturating_sub(ask.committed_tokens));
        let each = match ask.max_tokens {
            0 => UNSAID_ANSWER_TOKENS,
            said => u64::from(said + ask.committed_tokens),
        };
        let wanted = u64::from(ask.choices) * each;
        let Some(limited) = self.tenants.get(&ask.tenant).copied() else {
            self.book(now_s, router, ask, prompt, wanted, wanted, price, true);
            return Verdict::Go;
        };
        let meters = meters_of(&ask.tenant, &limited.limits, &ask.session_id, self.unix_s(now_s));
        match self.room(now_s, &limited, &meters, prompt, wanted, price) {
            Ok(allowed) => {
                let durable = !self.keeps;
                self.book(now_s, router, ask, prompt, wanted, allowed, price, durable);
                if durable {
                    Verdict::Go
                } else {
                    Verdict::Wait
                }
            }
            Err(verdict) => verdict,
        }
    }

    /// A request that its router has placed by itself: a fact.
    pub fn placed(&mut self, now_s: f64, router: &Arc<str>, ask: &Ask, price: Price) {
        if ask.booking == 0 || self.open.contains_key(&ask.booking) {
            return;
        }
        let prompt = u64::from(ask.prompt_tokens.saturating_sub(ask.committed_tokens));
        let wanted = u64::from(ask.choices) * u64::from(ask.max_tokens + ask.committed_tokens);
        self.book(now_s, router, ask, prompt, wanted, wanted, price, true);
    }

    /// How many tokens of an answer all meters have room for.
    fn room(
        &mut self,
        now_s: f64,
        limited: &Limited,
        meters: &[(MeterKey, u64)],
        prompt: u64,
        wanted: u64,
        price: Price,
    ) -> Result<u64, Verdict> {
        let mut waits = false;
        for (key, limit) in meters {
            waits |= !self.is_ready(now_s, limited, key, *limit, amount(&key.of, prompt, wanted, price));
        }
        if waits {
            return Err(Verdict::Wait);
        }
        let mut allowed = wanted;
        for (key, limit) in meters {
            let meter = self.meters.get(key).cloned().unwrap_or_default();
            let room = meter.room(self.in_force(&meter, *limit));
            let fits = match key.of {
                Of::Concurrent if room > 0 => wanted,
                Of::Concurrent => 0,
                Of::Month(_) => {
                    let left = (u128::from(room) * 1000).saturating_sub(u128::from(price.prompt) * u128::from(prompt));
                    let enough = price.of(prompt, 0) <= room;
                    match u128::from(price.output) {
                        _ if !enough => 0,
                        0 => wanted,
                        each => u64::try_from(left / each).unwrap_or(u64::MAX),
                    }
                }
                Of::Minute(_) | Of::Day(_) | Of::Session(_) => room.saturating_sub(prompt),
            };
            let least = match key.of {
                Of::Minute(_) => LEAST_ANSWER_TOKENS.max((limit / MINUTE_PART).saturating_sub(prompt)),
                _ => LEAST_ANSWER_TOKENS,
            };
            let least = least.min(wanted);
            if fits < least {
                return Err(Verdict::No(self.refuse(
                    now_s,
                    key,
                    &meter,
                    *limit,
                    amount(&key.of, prompt, least, price),
                )));
            }
            allowed = allowed.min(fits);
        }
        Ok(allowed)
    }

    /// What may be spent of a limit here.
    fn in_force(&self, meter: &Meter, limit: u64) -> u64 {
        match self.shared {
            true => meter.drawn.min(limit),
            false => limit,
        }
    }

    /// Whether a meter can be read. When it has to be looked up, or something to be drawn, that is on its way.
    fn is_ready(&mut self, now_s: f64, limited: &Limited, key: &MeterKey, limit: u64, wanted: u64) -> bool {
        let meter = match self.meters.get_mut(key) {
            Some(meter) => meter,
            None => {
                self.sweep(now_s);
                // Since its beginning all that was spent came by here.
                let begins_s = key.of.window_s().map(|(begins_s, _)| begins_s as f64);
                let seen = begins_s.is_some_and(|begins_s| begins_s > limited.since_s) || key.of == Of::Concurrent;
                let known = !self.keeps || (seen && !self.shared);
                self.meters.entry(key.clone()).or_insert_with(|| Meter {
                    known,
                    ..Meter::default()
                })
            }
        };
        meter.used_s = now_s;
        let mut want = 0;
        if self.shared {
            let missing = wanted.saturating_sub(meter.room(meter.drawn.min(limit)));
            if missing > 0 && meter.drawn < limit && now_s >= meter.short_until_s {
                want = missing.max(limit / DRAW_PARTS).min(limit - meter.drawn);
            }
        }
        if meter.known && want == 0 {
            return true;
        }
        if !meter.looking {
            meter.looking = true;
            self.push(Entry::Look {
                meter: key.clone(),
                want,
                limit,
            });
        }
        false
    }

    fn refuse(&self, now_s: f64, key: &MeterKey, meter: &Meter, limit: u64, needed: u64) -> Refused {
        let shown = |value: u64| match key.of {
            Of::Month(_) => format!("${:.6}", value as f64 / 1e9),
            _ => value.to_string(),
        };
        let name = key.of.name();
        let mut message = format!("{name}: the limit is {}", shown(limit));
        if self.shared {
            message += &format!(", and this scheduler has {} of it", shown(meter.drawn));
        }
        message += &match key.of {
            Of::Concurrent => format!("; {} are open", meter.held),
            _ => format!(
                "; {} are spent, {} are held by open requests, and this one needs at least {}",
                shown(meter.spent),
                shown(meter.held),
                shown(needed)
            ),
        };
        let until_s = key.of.window_s().map(|(_, ends_s)| ends_s as f64 - self.unix_s(now_s));
        let ms = |seconds: f64| (seconds.max(0.001) * 1000.0).ceil() as u32;
        let retry_after_ms = if needed > limit {
            None
        } else if meter.spent.saturating_add(needed) <= self.in_force(meter, limit) {
            // Only what is open stands in the way, and may cost less than it holds.
            Some(until_s.map_or(HELD_RETRY_MS, |until_s| HELD_RETRY_MS.min(ms(until_s))))
        } else {
            until_s.filter(|until_s| *until_s <= SOON_S).map(ms)
        };
        Refused {
            message,
            retry_after_ms,
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn book(
        &mut self,
        now_s: f64,
        router: &Arc<str>,
        ask: &Ask,
        prompt: u64,
        wanted: u64,
        allowed: u64,
        price: Price,
        durable: bool,
    ) {
        let kept = Kept {
            booking: ask.booking,
            router: router.clone(),
            request_id: ask.request_id.clone(),
            tenant: ask.tenant.clone(),
            session: ask.session_id.clone(),
            alias: ask.alias.clone(),
            pool: ask.pools.first().cloned().unwrap_or_default(),
            class: ask.class,
            placed_s: self.unix_s(now_s),
            prompt_tokens: u32::try_from(prompt).unwrap_or(u32::MAX),
            tokens: prompt.saturating_add(allowed),
            nano_dollars: price.of(prompt, allowed),
            allowance: if allowed < wanted {
                u32::try_from(allowed).unwrap_or(u32::MAX)
            } else {
                0
            },
            price,
        };
        self.insert(now_s, kept, durable);
        if let Some(open) = self.open.get_mut(&ask.booking) {
            open.committed_tokens = ask.committed_tokens;
        }
        if !durable {
            self.keep(ask.booking);
        } else if self.keeps {
            self.young.push_back((now_s, ask.booking));
        }
    }

    /// A note of it goes to the ledger, for the next start.
    fn keep(&mut self, booking: Booking) {
        if let Some(open) = self.open.get_mut(&booking) {
            open.noted = true;
            let entry = Entry::Keep(Box::new(open.kept.clone()));
            self.push(entry);
        }
    }

    /// Bookings of tenants without limits are kept too, once they have been open for a while, off their requests' way: if
    /// their router dies and we do, the next start knows whose they were, and workers tell what they gave.
    pub fn keep_long_ones(&mut self, now_s: f64) {
        while let Some(&(_, booking)) = self.young.front().filter(|(since_s, _)| since_s + YOUNG_S <= now_s) {
            self.young.pop_front();
            let open = self.open.get(&booking);
            if open.is_some_and(|open| !open.noted && open.settled.is_none()) {
                self.keep(booking);
            }
        }
    }

    fn insert(&mut self, now_s: f64, kept: Kept, durable: bool) {
        let booking = kept.booking;
        self.by_router.entry(kept.router.clone()).or_default().insert(booking);
        let open = Open {
            kept,
            durable,
            noted: false,
            meters: Vec::new(),
            slot: 1,
            committed_tokens: 0,
            output_tokens: 0,
            cached_tokens: 0,
            ran: false,
            settled: None,
        };
        self.open.insert(booking, open);
        self.measure(now_s, booking);
    }

    /// Puts what a booking holds on the meters that its tenant has now.
    fn measure(&mut self, now_s: f64, booking: Booking) {
        let Some(open) = self.open.get_mut(&booking) else {
            return;
        };
        open.meters.clear();
        let Some(limited) = self.tenants.get(&open.kept.tenant).copied() else {
            return;
        };
        let placed_s = open.kept.placed_s;
        let meters = meters_of(&open.kept.tenant, &limited.limits, &open.kept.session, placed_s);
        open.meters = meters.iter().map(|(key, _)| key.clone()).collect();
        let holds: Vec<_> = open.meters.iter().map(|key| open.holds(&key.of)).collect();
        for ((key, _), held) in meters.into_iter().zip(holds) {
            // One that has to be looked up is, when somebody wants to be let in by it.
            if !self.meters.contains_key(&key) {
                let seen = (key.of.window_s()).is_some_and(|(begins_s, _)| begins_s as f64 > limited.since_s);
                let known = !self.keeps || ((seen || key.of == Of::Concurrent) && !self.shared);
                self.meters.insert(
                    key.clone(),
                    Meter {
                        known,
                        used_s: now_s,
                        ..Meter::default()
                    },
                );
            }
            if let Some(meter) = self.meters.get_mut(&key) {
                meter.held += held;
            }
        }
    }

    /// What a booking of an earlier start holds. Its router may come back for it.
    pub fn restore(&mut self, now_s: f64, kept: Kept) {
        if !self.open.contains_key(&kept.booking) {
            let booking = kept.booking;
            self.insert(now_s, kept, true);
            if let Some(open) = self.open.get_mut(&booking) {
                open.noted = true;
            }
        }
    }

    // What is heard of a booking while it is open.

    /// What its request may have, over all choices; 0 = no limit of its own.
    pub fn allowance(&self, booking: Booking) -> u32 {
        self.open.get(&booking).map_or(0, |open| open.kept.allowance)
    }

    /// It runs in that pool, whose tokens cost that now.
    pub fn runs(&mut self, booking: Booking, pool: &Arc<str>, price: Price) {
        if let Some(open) = self.open.get_mut(&booking) {
            open.ran = true;
            open.kept.pool = pool.clone();
            // Never more than what is held for it.
            open.kept.price.prompt = open.kept.price.prompt.min(price.prompt);
            open.kept.price.output = open.kept.price.output.min(price.output);
        }
    }

    /// Its running attempt has brought so many tokens.
    pub fn grows(&mut self, booking: Booking, output_tokens: u32, cached_tokens: u32) {
        if let Some(open) = self.open.get_mut(&booking) {
            open.output_tokens = open.output_tokens.max(open.committed_tokens + output_tokens);
            open.cached_tokens = open.cached_tokens.max(cached_tokens);
        }
    }

    // Settling.

    /// What a request has cost. It counts as that from now on; `price` is for a booking that was never opened here.
    /// Returns how many entries have to be done for it to be durable.
    pub fn settle(&mut self, now_s: f64, mut said: Settlement, price: Price) -> u64 {
        let booking = said.booking;
        if let Some(done) = self.open.get(&booking).and_then(|open| open.settled) {
            return done;
        }
        let charged = !said.replayed && (said.output_tokens > 0 || (said.ran && !said.our_fault));
        if !charged && !said.replayed {
            self.close(booking);
            return self.pushed;
        }
        if let Some(open) = self.open.get(&booking) {
            said.placed_s = open.kept.placed_s;
            if open.ran {
                said.pool = open.kept.pool.clone();
            }
        } else {
            let kept = Kept {
                booking,
                router: said.router.clone(),
                tenant: said.tenant.clone(),
                session: said.session.clone(),
                placed_s: said.placed_s,
                price,
                ..Kept::default()
            };
            self.insert(now_s, kept, true);
        }
        let price = self.open.get(&booking).map_or(price, |open| open.kept.price);
        let mut row = Row {
            price,
            variant_saved_nano_dollars: saved_by_variant(&said, price),
            ..Row::default()
        };
        if said.replayed {
            row.replayed_prompt_tokens = std::mem::take(&mut said.prompt_tokens);
            row.replayed_output_tokens = std::mem::take(&mut said.output_tokens);
            said.cached_tokens = 0;
            row.answer_saved_nano_dollars =
                price.of(row.replayed_prompt_tokens.into(), row.replayed_output_tokens.into());
        } else {
            said.cached_tokens = said.cached_tokens.min(said.prompt_tokens);
            let uncached = said.prompt_tokens - said.cached_tokens;
            row.nano_dollars = price.of(uncached.into(), said.output_tokens.into());
            row.prefix_saved_nano_dollars = price.of(said.cached_tokens.into(), 0);
        }
        row.of = said;
        self.rehold(booking, row.tokens(), row.nano_dollars);
        if !self.keeps {
            self.written(booking, true);
            return 0;
        }
        self.push(Entry::Row(Box::new(row)));
        let done = self.pushed;
        if let Some(open) = self.open.get_mut(&booking) {
            open.settled = Some(done);
        }
        done
    }

    /// A booking holds what its request has cost, and no place among those that run.
    fn rehold(&mut self, booking: Booking, tokens: u64, nano_dollars: u64) {
        let Some(open) = self.open.get_mut(&booking) else {
            return;
        };
        for key in &open.meters {
            if let Some(meter) = self.meters.get_mut(key) {
                meter.held -= open.holds(&key.of).min(meter.held);
            }
        }
        open.kept.tokens = tokens;
        open.kept.nano_dollars = nano_dollars;
        open.slot = 0;
        for key in &open.meters {
            if let Some(meter) = self.meters.get_mut(key) {
                meter.held += open.holds(&key.of);
            }
        }
    }

    /// The ledger has the row of a booking; `new`: it is the first one.
    fn written(&mut self, booking: Booking, new: bool) {
        let Some(open) = self.forget(booking) else {
            return;
        };
        for key in &open.meters {
            let amount = open.holds(&key.of);
            let Some(meter) = self.meters.get_mut(key) else {
                continue;
            };
            meter.held -= amount.min(meter.held);
            // Otherwise the look that will make it known finds the row.
            if new && meter.known {
                meter.spent = meter.spent.saturating_add(amount);
            }
        }
    }

    /// A booking whose request has cost nothing.
    fn close(&mut self, booking: Booking) {
        self.rehold(booking, 0, 0);
        if let Some(open) = self.forget(booking) {
            if open.noted {
                self.push(Entry::Forget(booking));
            }
        }
    }

    fn forget(&mut self, booking: Booking) -> Option<Open> {
        let open = self.open.remove(&booking)?;
        if let Some(of_router) = self.by_router.get_mut(&open.kept.router) {
            of_router.remove(&booking);
            if of_router.is_empty() {
                self.by_router.remove(&open.kept.router);
            }
        }
        Some(open)
    }

    // Routers.

    /// Whether a router has open bookings.
    pub fn has_open(&self, router: &str) -> bool {
        self.by_router.contains_key(router)
    }

    /// Routers with open bookings.
    pub fn routers(&self) -> impl Iterator<Item = &Arc<str>> {
        self.by_router.keys()
    }

    /// A router is gone, or has come back without those of its bookings that are not in `kept`: nobody will settle them but
    /// us, by what workers and the router itself have said so far.
    pub fn orphaned(&mut self, now_s: f64, router: &str, kept: &BTreeSet<Booking>) {
        let of_router = self.by_router.get(router).into_iter().flatten();
        let orphans: Vec<_> = of_router.copied().filter(|booking| !kept.contains(booking)).collect();
        for booking in orphans {
            let Some(open) = self.open.get(&booking).filter(|open| open.settled.is_none()) else {
                continue;
            };
            let kept = &open.kept;
            let said = Settlement {
                booking,
                router: kept.router.clone(),
                request_id: kept.request_id.clone(),
                tenant: kept.tenant.clone(),
                session: kept.session.clone(),
                alias: kept.alias.clone(),
                pool: kept.pool.clone(),
                class: kept.class,
                placed_s: kept.placed_s,
                outcome: Arc::from("failed"),
                our_fault: true,
                ran: open.ran,
                replayed: false,
                prompt_tokens: kept.prompt_tokens,
                cached_tokens: open.cached_tokens,
                output_tokens: match kept.allowance {
                    0 => open.output_tokens,
                    allowance => open.output_tokens.min(allowance),
                },
                ..Settlement::default()
            };
            let price = kept.price;
            self.settle(now_s, said, price);
        }
    }

    // The ledger's work.

    fn push(&mut self, entry: Entry) {
        self.pushed += 1;
        self.entries.push_back(entry);
    }

    /// The next entries for the ledger, at most so many, when those before are done.
    pub fn take(&mut self, most: usize) -> &VecDeque<Entry> {
        if self.taken.is_empty() {
            let count = most.min(self.entries.len());
            self.taken.extend(self.entries.drain(..count));
        }
        &self.taken
    }

    /// All that was taken is durable. `answers`: one for each. Returns the tenants whose asks may be tried again.
    pub fn done(&mut self, now_s: f64, answers: &[Answer]) -> BTreeSet<Tenant> {
        let mut again = BTreeSet::new();
        let taken = std::mem::take(&mut self.taken);
        self.done += taken.len() as u64;
        for (entry, answer) in taken
            .into_iter()
            .zip(answers.iter().copied().chain(std::iter::repeat(Answer::default())))
        {
            match entry {
                Entry::Row(row) => self.written(row.of.booking, answer.first == 1),
                Entry::Keep(kept) => {
                    if let Some(open) = self.open.get_mut(&kept.booking) {
                        open.durable = true;
                        again.insert(kept.tenant.clone());
                    }
                }
                Entry::Look { meter: key, want, .. } => {
                    again.insert(key.tenant.clone());
                    let Some(meter) = self.meters.get_mut(&key) else {
                        continue;
                    };
                    meter.looking = false;
                    if !meter.known {
                        meter.known = true;
                        meter.spent = answer.first;
                    }
                    if answer.second < meter.drawn.saturating_add(want) {
                        meter.short_until_s = now_s + SHORT_S;
                    }
                    meter.drawn = answer.second;
                }
                Entry::Forget(_) | Entry::Return { .. } => {}
            }
        }
        again
    }

    /// How many entries are done.
    pub fn done_entries(&self) -> u64 {
        self.done
    }

    /// What is drawn and not needed goes back to the others: now and then.
    pub fn give_back(&mut self, now_s: f64, idle_s: f64) {
        if !self.shared {
            return;
        }
        let mut entries = Vec::new();
        for (key, meter) in &mut self.meters {
            let Some(limited) = self.tenants.get(&key.tenant).filter(|_| meter.known && !meter.looking) else {
                continue;
            };
            let limit = limit_of(&limited.limits, &key.of);
            let spare = meter.drawn.saturating_sub(meter.spent.saturating_add(meter.held));
            let keep = match now_s - meter.used_s < idle_s {
                true => limit / DRAW_PARTS,
                false => 0,
            };
            if spare > keep {
                meter.drawn -= spare - keep;
                entries.push(Entry::Return {
                    meter: key.clone(),
                    drawn: meter.drawn,
                });
            }
        }
        // In one order, whatever the map's is.
        entries.sort_by(|one, other| match (one, other) {
            (Entry::Return { meter: one, .. }, Entry::Return { meter: other, .. }) => one.cmp(other),
            _ => std::cmp::Ordering::Equal,
        });
        entries.into_iter().for_each(|entry| self.push(entry));
    }

    /// Meters of times that are over, or that can be looked up again, go.
    fn sweep(&mut self, now_s: f64) {
        let unix_s = self.unix_s(now_s);
        let minute = (unix_s / 60.0).floor() as i64;
        if minute != self.swept_minute {
            self.swept_minute = minute;
            let over = |of: &Of| of.window_s().is_some_and(|(_, ends_s)| (ends_s as f64) <= unix_s);
            self.meters.retain(|key, meter| meter.held > 0 || !over(&key.of));
        }
        if self.keeps && self.meters.len() >= MAX_METERS {
            let idle = |meter: &Meter| meter.held == 0 && !meter.looking && meter.drawn == 0;
            self.meters
                .retain(|key, meter| !(matches!(key.of, Of::Session(_)) && idle(meter)));
        }
    }

    /// When a booking was opened, in Unix time.
    #[cfg(test)]
    pub(super) fn placed_s(&self, booking: Booking) -> Option<f64> {
        self.open.get(&booking).map(|open| open.kept.placed_s)
    }

    /// All of them, for tests.
    #[cfg(test)]
    pub(super) fn meters(&self) -> impl Iterator<Item = &Meter> {
        self.meters.values()
    }

    /// A meter as it is, for tests and people.
    pub fn meter(&self, key: &MeterKey) -> Option<&Meter> {
        self.meters.get(key)
    }
}

/// See the row. Nothing is said before the best one's tokens have a price.
fn saved_by_variant(said: &Settlement, price: Price) -> i64 {
    if said.pool == said.best || said.best_price == Price::default() {
        return 0;
    }
    let cost = |price: Price| price.of(said.prompt_tokens.into(), said.output_tokens.into());
    let [best, own] = [cost(said.best_price), cost(price)].map(|nano| i64::try_from(nano).unwrap_or(i64::MAX));
    best - own
}

/// What a request needs of a meter.
fn amount(of: &Of, prompt: u64, output: u64, price: Price) -> u64 {
    match of {
        Of::Concurrent => 1,
        Of::Month(_) => price.of(prompt, output),
        Of::Minute(_) | Of::Day(_) | Of::Session(_) => prompt.saturating_add(output),
    }
}

fn limit_of(limits: &Limits, of: &Of) -> u64 {
    match of {
        Of::Concurrent => limits.concurrent_requests,
        Of::Minute(_) => limits.tokens_per_minute,
        Of::Day(_) => limits.tokens_per_day,
        Of::Month(_) => limits.nano_dollars_per_month,
        Of::Session(_) => limits.session_tokens,
    }
}
