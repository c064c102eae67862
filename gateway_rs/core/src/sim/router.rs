//! A simulated router: asks the scheduler for each request, or places it itself within the room that it was lent.
//!
//! What it does with what it is lent is [`Holder`]'s, as in a live one. Who holds which prefix blocks it knows as the
//! scheduler does: both follow the same news.

use std::collections::BTreeSet;

use ahash::{HashMap, HashMapExt};
use rand::rngs::StdRng;
use rand::SeedableRng;

use crate::credits::{Grantor, Holder, Room, Taken, Wanted, OWN_LEASE};
use crate::index::PrefixIndex;
use crate::scheduler::actions::Action;
use crate::scheduler::events::{Ask, LeaseId, Link};
use crate::scheduler::leases::kv_tokens;

/// One router.
#[derive(Debug)]
pub struct Router {
    holder: Holder,
    rng: StdRng,
    /// What requests take that it has placed itself.
    taken: HashMap<u32, Taken>,
    next_lease: LeaseId,
}

impl Router {
    /// Router `number`, whose draws follow from the run's seed.
    #[must_use]
    pub fn new(number: u32, seed: u64) -> Self {
        Self {
            holder: Holder::default(),
            rng: StdRng::seed_from_u64(seed ^ (u64::from(number) + 1) << 32),
            taken: HashMap::new(),
            next_lease: OWN_LEASE | u64::from(number) << 32,
        }
    }

    /// A lease and a worker for a request, when there is room for it and nobody before it; otherwise it has to be asked for.
    pub fn place(&mut self, now_s: f64, ask: &Ask, index: &PrefixIndex) -> Option<(LeaseId, Link)> {
        let wanted = Wanted {
            pool: ask.pools.first()?,
            prompt_tokens: ask.prompt_tokens,
            blocks: &ask.block_hashes,
            room: Room {
                choices: u64::from(ask.choices),
                kv_tokens: kv_tokens(ask),
            },
            may_part: ask.may_part,
            avoid: &BTreeSet::new(),
        };
        let taken = self.holder.place(now_s, &wanted, index, &mut self.rng)?;
        let worker = taken.worker;
        self.taken.insert(ask.number as u32, taken);
        self.next_lease += 1;
        Some((self.next_lease, worker))
    }

    /// The first token of a request has come.
    pub fn begun(&mut self, request: u32) {
        if let Some(taken) = self.taken.get_mut(&request) {
            self.holder.begun(taken);
        }
    }

    /// A request has ended, or is given up there.
    pub fn give_back(&mut self, now_s: f64, request: u32) {
        if let Some(taken) = self.taken.remove(&request) {
            self.holder.give_back(now_s, taken);
        }
    }

    /// Takes in what the scheduler says of a worker; the share that it knows now. `grantor`: who that is, while it is there.
    pub fn hear(&mut self, now_s: f64, action: &Action, grantor: Option<Grantor>) -> Option<u64> {
        match *action {
            Action::Lent { share, outlook } => {
                // Of one that has just gone the scheduler says so next.
                self.holder.introduce(share.worker, grantor?);
                self.holder
                    .receive(now_s, share.number, share.worker, share.room, outlook);
                return Some(self.holder.known());
            }
            Action::News { worker, outlook, .. } => self.holder.hear(now_s, worker, outlook),
            Action::Unlent { worker, .. } => self.holder.forget(worker),
            _ => {}
        }
        None
    }
}
