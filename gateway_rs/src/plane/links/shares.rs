//! Room on workers that the scheduler has lent to this router: placing within it needs no question.
//!
//! The rules are `headrace_core::credits`'; here they meet the wire.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Instant,
};

use headrace_core::{
    blocks::Blocks,
    cost::PromptCost,
    credits::{self, Holder, Outlook, Room, Taken, Wanted, OWN_LEASE},
    scheduler::{events::Link, leases::expected_kv_tokens},
};
use parking_lot::RwLock;
use rand::{rngs::SmallRng, SeedableRng};

use crate::proto::{place_request::Ask, share::Grantor, Grant, PlacementReason, Share};

/// Who holds which prefix blocks, as the cache tells: read for each request, written in short parts.
pub type SharedBlocks = Arc<RwLock<Blocks>>;

/// What this router holds.
pub struct Shares {
    holder: Holder,
    grantors: HashMap<Link, Grantor>,
    blocks: SharedBlocks,
    rng: SmallRng,
    /// Counts up from anywhere: other routers count elsewhere.
    next_lease: u64,
    /// The holder's clock begins here.
    started: Instant,
}

impl Shares {
    /// Nothing yet.
    pub fn new(blocks: SharedBlocks) -> Self {
        Self {
            holder: Holder::default(),
            grantors: HashMap::new(),
            blocks,
            rng: SmallRng::from_os_rng(),
            next_lease: rand::random(),
            started: Instant::now(),
        }
    }

    /// A new stream begins: shares of the last one are void.
    pub fn reset(&mut self) {
        self.holder.reset();
        for (_, grantor) in self.grantors.drain() {
            self.blocks.write().give_back(&grantor.instance_id);
        }
    }

    /// Takes in a share, or news of a worker. True when the scheduler should hear that it is known.
    pub fn receive(&mut self, share: Share) -> bool {
        if share.gone {
            self.holder.forget(share.worker);
            if let Some(grantor) = self.grantors.remove(&share.worker) {
                self.blocks.write().give_back(&grantor.instance_id);
            }
            return false;
        }
        if let Some(grantor) = share.grantor {
            let lends = credits::Grantor {
                pool: grantor.pool.as_str().into(),
                number: self.blocks.write().claim(&grantor.instance_id.as_str().into()),
                block_tokens: grantor.block_tokens,
            };
            self.holder.introduce(share.worker, lends);
            self.grantors.insert(share.worker, grantor);
        }
        let outlook = Outlook {
            pending_prefill_ms: share.pending_prefill_ms.into(),
            cost: PromptCost {
                token_ms: share.prefill_ms_per_token.into(),
                pair_ms: share.prefill_ms_per_pair.into(),
            },
            decoding: share.decoding,
            waiting: share.waiting,
            ahead_ms: share.ahead_ms.map(f64::from),
            idle_ms: share.idle_ms.map(f64::from),
            ask_from_tokens: share.ask_from_tokens,
            placed: share.placed,
        };
        if share.number == 0 {
            self.holder.hear(self.now_s(), share.worker, outlook);
            return false;
        }
        let room = Room {
            choices: share.choices,
            kv_tokens: share.kv_tokens,
        };
        self.holder
            .receive(self.now_s(), share.number, share.worker, room, outlook);
        true
    }

    /// The last share that is known.
    pub fn known(&self) -> u64 {
        self.holder.known()
    }

    /// Places a request; None when it has to be asked for.
    pub fn place(&mut self, ask: &Ask) -> Option<(Grant, Taken)> {
        let choices = ask.n.max(1);
        let avoided = |grantor: &Grantor| ask.avoid_instances.contains(&grantor.instance_id);
        let avoid: BTreeSet<Link> = match ask.avoid_instances.is_empty() {
            true => BTreeSet::new(),
            false => {
                let grantors = self.grantors.iter().filter(|(_, grantor)| avoided(grantor));
                grantors.map(|(&link, _)| link).collect()
            }
        };
        let wanted = Wanted {
            // The first pool only: whether a later one will do is the scheduler's to say.
            pool: ask.pools.first()?,
            prompt_tokens: ask.prompt_tokens,
            blocks: &ask.block_hashes,
            room: Room {
                choices: choices.into(),
                kv_tokens: expected_kv_tokens(ask.prompt_tokens, choices, ask.max_tokens, ask.expected_output_tokens),
            },
            may_part: ask.may_part,
            avoid: &avoid,
        };
        let now_s = self.now_s();
        let taken = self
            .holder
            .place(now_s, &wanted, self.blocks.read().index(), &mut self.rng)?;
        let grantor = self.grantors.get(&taken.worker)?;
        self.next_lease = self.next_lease.wrapping_add(1);
        let grant = Grant {
            lease: self.next_lease | OWN_LEASE,
            worker_id: grantor.worker_id.clone(),
            instance_id: grantor.instance_id.clone(),
            address: grantor.address.clone(),
            reason: Some(PlacementReason::from(taken.why)),
            pool: grantor.pool.clone(),
            ..Grant::default()
        };
        Some((grant, taken))
    }

    fn now_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// The first token of a request that was placed here has come.
    pub fn begun(&mut self, taken: &mut Taken) {
        self.holder.begun(taken);
    }

    /// A request that was placed here has ended.
    pub fn give_back(&mut self, taken: Taken) {
        self.holder.give_back(self.now_s(), taken);
    }
}
