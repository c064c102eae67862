//! Fairness between tenants: what each has had of a pool, in tokens computed for it.
//!
//! A deficit round robin. Each account may spend a quantum (times its weight) in a round; who has spent it is in debt and
//! comes after all that wait and are not. When nobody who waits has credit, the next round begins for all. What is charged is
//! what the pool has to compute: uncached prompt tokens, and twice the answer's. The estimate at the grant is corrected by
//! the books at the release.
//!
//! Two tenants that both wait all the time differ in what they have had, per weight, by at most two quanta and two requests.

use std::sync::Arc;

use super::map::Map;

/// A token of an answer weighs so many uncached prompt tokens: it occupies a whole step of the batch.
pub const OUTPUT_WEIGHT: f64 = 2.0;

/// One tenant in one pool, by number.
pub type AccountId = u32;

#[derive(Clone, Debug)]
struct Account {
    pool: u32,
    key: (u32, Arc<str>),
    weight: f64,
    /// What it may still spend, as of that round.
    credit: f64,
    round: u64,
    /// Requests that wait or run.
    open: u32,
}

/// All accounts that matter: those of tenants with something waiting or running.
#[derive(Debug)]
pub struct Accounts {
    quantum: f64,
    weights: Map<Arc<str>, f64>,
    accounts: Vec<Account>,
    free: Vec<AccountId>,
    by_key: Map<(u32, Arc<str>), AccountId>,
    pools: Map<Arc<str>, u32>,
    rounds: Vec<u64>,
}

impl Accounts {
    /// Nobody has had anything. `weights`: shares of tenants; 1 for those not named.
    pub fn new(quantum: f64, weights: impl IntoIterator<Item = (Arc<str>, f64)>) -> Self {
        let mut accounts = Self {
            quantum: quantum.max(1.0),
            weights: Map::default(),
            accounts: Vec::new(),
            free: Vec::new(),
            by_key: Map::default(),
            pools: Map::default(),
            rounds: Vec::new(),
        };
        accounts.set_weights(weights);
        accounts
    }

    /// Shares of tenants, for accounts that are opened from now on.
    pub fn set_weights(&mut self, weights: impl IntoIterator<Item = (Arc<str>, f64)>) {
        self.weights = weights
            .into_iter()
            .map(|(name, weight)| (name, weight.max(1e-3)))
            .collect();
    }

    /// A request of that tenant comes to that pool: its account, which is kept until as many have closed it.
    pub fn open(&mut self, pool: &Arc<str>, tenant: &Arc<str>) -> AccountId {
        let pool = match self.pools.get(pool) {
            Some(&pool) => pool,
            None => {
                let number = self.rounds.len() as u32;
                self.pools.insert(pool.clone(), number);
                self.rounds.push(0);
                number
            }
        };
        let key = (pool, tenant.clone());
        if let Some(&id) = self.by_key.get(&key) {
            self.accounts[id as usize].open += 1;
            return id;
        }
        let weight = self.weights.get(tenant).copied().unwrap_or(1.0);
        let account = Account {
            pool,
            key: key.clone(),
            weight,
            credit: self.quantum * weight,
            round: self.rounds[pool as usize],
            open: 1,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.accounts[id as usize] = account;
                id
            }
            None => {
                self.accounts.push(account);
                (self.accounts.len() - 1) as AccountId
            }
        };
        self.by_key.insert(key, id);
        id
    }

    /// A request has ended.
    pub fn close(&mut self, id: AccountId) {
        let account = &mut self.accounts[id as usize];
        account.open -= 1;
        if account.open == 0 {
            self.by_key.remove(&account.key);
            self.free.push(id);
        }
    }

    /// So much is computed for it, or, when negative, was charged too much.
    pub fn charge(&mut self, id: AccountId, tokens: f64) {
        self.settle(id);
        self.accounts[id as usize].credit -= tokens;
    }

    /// Whether it may go before those in debt.
    pub fn has_credit(&self, id: AccountId) -> bool {
        self.credit(id) > 0.0
    }

    /// Nobody who waits has credit and this one is served: as many rounds begin as it takes for it to have some.
    pub fn next_round(&mut self, id: AccountId) {
        let credit = self.credit(id);
        if credit > 0.0 {
            return;
        }
        let account = &self.accounts[id as usize];
        let a_round = self.quantum * account.weight;
        let rounds = (-credit / a_round).floor() + 1.0;
        self.rounds[account.pool as usize] += rounds as u64;
    }

    /// Accounts kept.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    fn credit(&self, id: AccountId) -> f64 {
        let account = &self.accounts[id as usize];
        let rounds = self.rounds[account.pool as usize] - account.round;
        let a_round = self.quantum * account.weight;
        // Credit is not saved up: who comes back finds one quantum.
        (account.credit + rounds as f64 * a_round).min(account.credit.max(a_round))
    }

    fn settle(&mut self, id: AccountId) {
        let credit = self.credit(id);
        let round = self.rounds[self.accounts[id as usize].pool as usize];
        let account = &mut self.accounts[id as usize];
        account.credit = credit;
        account.round = round;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts(weights: &[(&str, f64)]) -> Accounts {
        Accounts::new(1000.0, weights.iter().map(|&(name, weight)| (Arc::from(name), weight)))
    }

    /// Serves whoever has credit, else begins a round, until so many requests have been served; what each had.
    fn serve(accounts: &mut Accounts, ids: &[AccountId], costs: &[f64], times: usize) -> Vec<f64> {
        let mut had = vec![0.0; ids.len()];
        for _ in 0..times {
            let next = (0..ids.len())
                .find(|&index| accounts.has_credit(ids[index]))
                .unwrap_or(0);
            accounts.next_round(ids[next]);
            accounts.charge(ids[next], costs[next]);
            had[next] += costs[next];
        }
        had
    }

    #[test]
    fn shares_follow_weights_whatever_the_requests_cost() {
        let mut accounts = accounts(&[("b", 2.0)]);
        let (pool, names) = (Arc::from("p"), ["a", "b", "c"]);
        let ids: Vec<_> = names
            .iter()
            .map(|name| accounts.open(&pool, &Arc::from(*name)))
            .collect();
        let costs = [50.0, 700.0, 3000.0];
        let had = serve(&mut accounts, &ids, &costs, 5000);
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            let weight = |index: usize| if index == 1 { 2.0 } else { 1.0 };
            let gap = (had[one] / weight(one) - had[other] / weight(other)).abs();
            assert!(gap <= 2.0 * 1000.0 + costs[one] + costs[other], "{had:?}");
        }
    }

    #[test]
    fn credit_is_not_saved_up_and_accounts_are_not_kept() {
        let mut accounts = accounts(&[]);
        let pool = Arc::from("p");
        let (busy, idle) = (
            accounts.open(&pool, &Arc::from("busy")),
            accounts.open(&pool, &Arc::from("idle")),
        );
        for _ in 0..100 {
            accounts.next_round(busy);
            accounts.charge(busy, 1500.0);
        }
        assert!(accounts.credit(idle) <= 1000.0);
        for id in [busy, idle] {
            accounts.close(id);
        }
        assert_eq!(accounts.len(), 0);
        assert!(accounts.free.len() == 2);
    }

    #[test]
    fn an_estimate_is_corrected() {
        let mut accounts = accounts(&[]);
        let id = accounts.open(&Arc::from("p"), &Arc::from("t"));
        accounts.charge(id, 5000.0);
        assert!(!accounts.has_credit(id));
        accounts.charge(id, -4900.0);
        assert!(accounts.has_credit(id));
    }
}
