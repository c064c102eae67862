//! Room on workers that the scheduler has lent to this router: placing within it needs no question.
//!
//! The rules are `headrace_core::credits`'; here they meet the wire.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use headrace_core::{
    credits::{Holder, Outlook, Room, Taken},
    scheduler::{events::Link, leases::expected_kv_tokens},
};
use rand::{rngs::SmallRng, SeedableRng};

use crate::proto::{place_request::Ask, share::Grantor, Grant, Share};

/// Leases that a router makes are told apart from the scheduler's by this bit.
const OWN_LEASE: u64 = 1 << 63;

/// What this router holds.
pub struct Shares {
    holder: Holder,
    workers: HashMap<Link, Worker>,
    rng: SmallRng,
    /// Counts up from anywhere: other routers count elsewhere.
    next_lease: u64,
}

struct Worker {
    grantor: Arc<Grantor>,
    pool: Arc<str>,
}

impl Default for Shares {
    fn default() -> Self {
        Self {
            holder: Holder::default(),
            workers: HashMap::new(),
            rng: SmallRng::from_os_rng(),
            next_lease: rand::random(),
        }
    }
}

impl Shares {
    /// A new stream begins: shares of the last one are void.
    pub fn reset(&mut self) {
        self.holder.reset();
        self.workers.clear();
    }

    /// Takes in a share, or news of a worker. True when the scheduler should hear that it is known.
    pub fn receive(&mut self, share: Share) -> bool {
        if share.gone {
            if let Some(worker) = self.workers.remove(&share.worker) {
                let (pool, nothing) = (worker.pool, Outlook::default());
                self.holder.receive(0, share.worker, &pool, Room::NONE, nothing);
            }
            return false;
        }
        if let Some(grantor) = share.grantor {
            let pool = grantor.pool.as_str().into();
            let grantor = Arc::new(grantor);
            self.workers.insert(share.worker, Worker { grantor, pool });
        }
        let Some(worker) = self.workers.get(&share.worker) else {
            return false;
        };
        let outlook = Outlook {
            pending_prefill_ms: share.pending_prefill_ms.into(),
            prefill_ms_per_token: share.prefill_ms_per_token.into(),
            decoding: share.decoding,
            waiting: share.waiting,
        };
        if share.number == 0 {
            self.holder.hear(share.worker, outlook);
            return false;
        }
        let room = Room {
            choices: share.choices,
            kv_tokens: share.kv_tokens,
        };
        self.holder
            .receive(share.number, share.worker, &worker.pool, room, outlook);
        true
    }

    /// The last share that is known.
    pub fn known(&self) -> u64 {
        self.holder.known()
    }

    /// Places a request in the first of its pools that has room for it; None when it has to be asked for.
    pub fn place(&mut self, ask: &Ask) -> Option<(Grant, Taken)> {
        let choices = ask.n.max(1);
        let room = Room {
            choices: choices.into(),
            kv_tokens: expected_kv_tokens(ask.prompt_tokens, choices, ask.max_tokens, ask.expected_output_tokens),
        };
        let avoided = |worker: &Worker| ask.avoid_instances.contains(&worker.grantor.instance_id);
        let avoid: BTreeSet<Link> = match ask.avoid_instances.is_empty() {
            true => BTreeSet::new(),
            false => {
                let workers = self.workers.iter().filter(|(_, worker)| avoided(worker));
                workers.map(|(&link, _)| link).collect()
            }
        };
        // The first pool only: whether a later one will do is the scheduler's to say.
        let pool = ask.pools.first()?;
        let taken = self
            .holder
            .place(pool, ask.prompt_tokens, room, &avoid, &mut self.rng)?;
        let Some(worker) = self.workers.get(&taken.worker) else {
            self.holder.give_back(taken);
            return None;
        };
        self.next_lease = self.next_lease.wrapping_add(1);
        let grant = Grant {
            lease: self.next_lease | OWN_LEASE,
            worker_id: worker.grantor.worker_id.clone(),
            instance_id: worker.grantor.instance_id.clone(),
            address: worker.grantor.address.clone(),
            ..Grant::default()
        };
        Some((grant, taken))
    }

    /// A request that was placed here has ended.
    pub fn give_back(&mut self, taken: Taken) {
        self.holder.give_back(taken);
    }
}
