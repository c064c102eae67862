//! Who may spend: asks pass the books before they are queued, and requests are settled in them. The books are
//! `budgets`'s, and so is the proof.
//!
//! An ask whose tenant has limits may have to wait for the ledger (to look a meter up, or to keep its booking). It is
//! *parked* meanwhile: in order for each tenant, and refused when the ledger does not answer.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use super::{
    actions::{Action, Reason, Refusal},
    core::{Core, Router},
    events::{Ask, Link},
    map::Key,
    rate::Rate,
};
use crate::budgets::{Answer, Booking, Budgets, Kept, Limits, Price, Prices, Settlement, Tenant, Verdict};

/// The ledger should have answered within this.
const PARKED_S: f64 = 5.0;

/// How often what is drawn and not needed is given back, and after how long nobody needs it.
const GIVE_BACK_S: f64 = 1.0;
const IDLE_S: f64 = 3.0;

/// Asks that wait for the ledger.
#[derive(Debug, Default)]
pub(super) struct Parking {
    by_tenant: BTreeMap<Tenant, VecDeque<Parked>>,
    count: usize,
    gave_back_s: f64,
}

#[derive(Debug)]
struct Parked {
    since_s: f64,
    link: Link,
    ask: Box<Ask>,
}

impl Parking {
    /// How many.
    pub fn len(&self) -> usize {
        self.count
    }

    pub(super) fn remove(&mut self, mut which: impl FnMut(Link, u64) -> bool) {
        for asks in self.by_tenant.values_mut() {
            asks.retain(|parked| !which(parked.link, parked.ask.number));
        }
        self.by_tenant.retain(|_, asks| !asks.is_empty());
        self.count = self.by_tenant.values().map(VecDeque::len).sum();
    }

    pub(super) fn contains(&self, link: Link, ask: u64) -> bool {
        let all = || self.by_tenant.values().flatten();
        self.count > 0 && all().any(|parked| parked.link == link && parked.ask.number == ask)
    }

    /// When the first has waited too long.
    pub(super) fn next_s(&self) -> Option<f64> {
        let first = self.by_tenant.values().filter_map(|asks| asks.front());
        first.map(|parked| parked.since_s + PARKED_S).min_by(f64::total_cmp)
    }
}

impl Core {
    /// The books and the prices, to be set up before anything happens.
    pub fn set_books(&mut self, budgets: Budgets, prices: Prices) {
        self.budgets = budgets;
        self.prices = prices;
    }

    /// The books.
    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// The same, for the driver to take entries.
    pub fn budgets_mut(&mut self) -> &mut Budgets {
        &mut self.budgets
    }

    /// Asks that wait for the ledger.
    pub fn parked(&self) -> usize {
        self.parking.len()
    }

    /// What tokens cost.
    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// Limits and weights of all tenants. Weights are for those who come from now on.
    pub fn set_tenants(&mut self, now_s: f64, limits: Vec<(Tenant, Limits)>, weights: Vec<(Tenant, f64)>) {
        self.budgets.set_tenants(now_s, limits);
        let configured = self.policy.tenant_weights.iter();
        let configured = configured.map(|(name, weight)| (Arc::from(name.as_str()), *weight));
        // What the tenants' file says comes after the configuration, and holds.
        self.queue.accounts.set_weights(configured.chain(weights));
    }

    /// What an earlier start kept: open bookings, whose routers have some time to come back.
    pub fn restore(&mut self, now_s: f64, kept: Vec<Kept>) {
        for each in kept {
            self.budgets.restore(now_s, each);
        }
        let expires_s = now_s + self.policy.router_grace_s.max(self.policy.silence_s());
        let routers: Vec<_> = self.budgets.routers().cloned().collect();
        for router_id in routers {
            self.routers.entry(router_id.clone()).or_insert_with(|| Router {
                link: None,
                leases: BTreeSet::new(),
                shares: None,
                demand: Rate::new(now_s),
                expires_s,
            });
            self.away.insert((Key(expires_s), router_id));
        }
    }

    /// The most that a token of that ask may cost.
    fn price(&self, ask: &Ask) -> Price {
        let pools = ask.pools.iter().map(|pool| self.prices.of(pool));
        pools.fold(Price::default(), Price::most)
    }

    /// Whether an ask may be queued now. If not, it has been refused or parked.
    pub(super) fn may_spend(&mut self, link: Link, ask: Box<Ask>) -> Option<Box<Ask>> {
        let router = self.routers_by_link.get(&link)?.clone();
        let price = self.price(&ask);
        match self.budgets.ask(self.now_s, &router, &ask, price) {
            Verdict::Go => Some(ask),
            Verdict::Wait => {
                if self.parking.count + self.queue.len() >= self.policy.max_queued.max(1) {
                    let limit = self.policy.max_queued;
                    let message = format!("{limit} requests wait already (limit {limit})");
                    self.refuse_spending(link, &ask, Reason::Overloaded, message, Some(1000));
                    return None;
                }
                let since_s = self.now_s;
                self.parking.count += 1;
                let asks = self.parking.by_tenant.entry(ask.tenant.clone()).or_default();
                asks.push_back(Parked { since_s, link, ask });
                None
            }
            Verdict::No(refused) => {
                let reason = match refused.retry_after_ms {
                    Some(_) => Reason::RateLimitExceeded,
                    None => Reason::InsufficientQuota,
                };
                self.refuse_spending(link, &ask, reason, refused.message, refused.retry_after_ms);
                None
            }
        }
    }

    fn refuse_spending(&mut self, link: Link, ask: &Ask, reason: Reason, message: String, retry_after_ms: Option<u32>) {
        self.actions.push(Action::Refused(Box::new(Refusal {
            link,
            ask: ask.number,
            reason,
            message,
            retryable: retry_after_ms.is_some(),
            retry_after_ms: retry_after_ms.unwrap_or(0),
        })));
    }

    /// The ledger has done what was taken from the books.
    pub(super) fn ledger_done(&mut self, answers: &[Answer]) {
        for tenant in self.budgets.done(self.now_s, answers) {
            let Some(parked) = self.parking.by_tenant.remove(&tenant) else {
                continue;
            };
            self.parking.count -= parked.len();
            for each in parked {
                self.unparked(each);
            }
        }
    }

    fn unparked(&mut self, parked: Parked) {
        // Its turn keeps the time when it came.
        let Parked { since_s, link, ask } = parked;
        if let Some(refusal) = self.refusal(link, &ask) {
            self.actions.push(Action::Refused(Box::new(refusal)));
            return;
        }
        let (tenant, number) = (ask.tenant.clone(), ask.number);
        if let Some(ask) = self.may_spend(link, ask) {
            self.enqueue(link, ask);
        } else if let Some(last) = self.parking.by_tenant.get_mut(&tenant).and_then(VecDeque::back_mut) {
            if last.link == link && last.ask.number == number {
                last.since_s = since_s;
            }
        }
    }

    /// What has waited too long for the ledger is refused; what is drawn goes back.
    pub(super) fn pass_time_in_books(&mut self) {
        while self.parking.next_s().is_some_and(|next_s| next_s <= self.now_s) {
            let mut late = Vec::new();
            for asks in self.parking.by_tenant.values_mut() {
                while asks
                    .front()
                    .is_some_and(|parked| parked.since_s + PARKED_S <= self.now_s)
                {
                    late.extend(asks.pop_front());
                }
            }
            self.parking.by_tenant.retain(|_, asks| !asks.is_empty());
            self.parking.count -= late.len();
            for parked in late {
                let message = format!("the ledger has not answered for {PARKED_S} s");
                self.refuse_spending(parked.link, &parked.ask, Reason::Unavailable, message, Some(1000));
            }
        }
        self.budgets.keep_long_ones(self.now_s);
        if self.now_s >= self.parking.gave_back_s + GIVE_BACK_S {
            self.parking.gave_back_s = self.now_s;
            self.budgets.give_back(self.now_s, IDLE_S);
        }
    }

    /// A request has ended, and its router says what it cost.
    pub(super) fn settled(&mut self, link: Link, number: u64, settlement: Settlement) {
        let price = self.prices.of(&settlement.pool);
        let router = self.routers_by_link.get(&link).cloned().unwrap_or_default();
        let settlement = Settlement {
            router,
            best_price: self.prices.of(&settlement.best),
            ..settlement
        };
        let entries = self.budgets.settle(self.now_s, settlement, price);
        self.actions.push(Action::Settled { link, number, entries });
    }

    /// Bookings that nobody will settle any more but us.
    pub(super) fn orphan(&mut self, router: &str, kept: &BTreeSet<Booking>) {
        self.budgets.orphaned(self.now_s, router, kept);
    }
}
