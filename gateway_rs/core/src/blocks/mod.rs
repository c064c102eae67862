//! Block news: how the cache, the schedulers and the routers come to know who holds which prefix blocks.
//!
//! A worker instance numbers its events. Whoever follows keeps the number of the next one: an event seen before is no news,
//! and one that leaves a gap means that it is not known any more what that instance holds, until a snapshot says so. The
//! rule is the same on both links, from workers to the cache and from there on, and stands here ([`Blocks`]); the sequence
//! numbers are the workers' own all the way, so a follower that has missed nothing goes on where it was, whichever cache it
//! talks to. What the cache does beside following is in [`Hub`].

mod hub;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use ahash::HashMap;

pub use self::hub::{Hello, Holder, Hub, Link, LOG_BLOCKS};
use crate::index::{Limits, PrefixIndex, WorkerId, NO_BLOCK};

/// Blocks that are taken in at once while others wait to look.
pub const PART: usize = 1024;

/// The next event of an instance that a follower knows and of which it needs all anew.
pub const NOT_IN_STEP: u64 = u64::MAX;

/// What happened to a worker's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// These came, each the child of the one before it.
    Stored {
        /// The block before the first; [`NO_BLOCK`] = none.
        parent: u64,
        /// Their names.
        blocks: Vec<u64>,
    },
    /// These went.
    Removed(Vec<u64>),
    /// All went.
    Cleared,
}

impl Change {
    /// How many blocks it names.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Stored { blocks, .. } | Self::Removed(blocks) => blocks.len(),
            Self::Cleared => 0,
        }
    }

    /// Whether it names none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A change with its number among those of its instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Without gaps.
    pub sequence: u64,
    /// What happened.
    pub change: Change,
}

/// What an instance holds, as of just before the event `next_sequence`: chains, each with the block before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The first event that is not in it.
    pub next_sequence: u64,
    /// Parent and blocks.
    pub chains: Vec<(u64, Vec<u64>)>,
}

/// What a follower needs next of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Events from this one on.
    From(u64),
    /// All that is held now, then events.
    Snapshot,
}

/// News of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Whose.
    pub instance_id: Arc<str>,
    /// It is not followed any more, or not there.
    pub gone: bool,
    /// What is known before this is void.
    pub snapshot: Option<Snapshot>,
    /// In order, after the snapshot.
    pub events: Vec<Event>,
}

#[derive(Debug)]
struct Instance {
    number: WorkerId,
    /// None = it is not known what it holds.
    next_sequence: Option<u64>,
    /// News of it came.
    fed: bool,
    /// Its number is in use by the owner of this.
    claimed: bool,
}

/// Who holds which blocks, by the instances' names.
#[derive(Debug, Default)]
pub struct Blocks {
    index: PrefixIndex,
    instances: HashMap<Arc<str>, Instance>,
    names: Vec<Option<Arc<str>>>,
    free: Vec<WorkerId>,
    gaps: u64,
}

impl Blocks {
    /// Knows nobody.
    #[must_use]
    pub fn new(limits: Limits, seed: u64) -> Self {
        Self {
            index: PrefixIndex::new(limits, seed),
            ..Self::default()
        }
    }

    /// Who holds what, by the instances' numbers.
    #[must_use]
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// To write what is believed of an instance of which no news comes.
    pub fn index_mut(&mut self) -> &mut PrefixIndex {
        &mut self.index
    }

    /// Events that could not be taken in for want of those before them.
    #[must_use]
    pub fn gaps(&self) -> u64 {
        self.gaps
    }

    // Names and numbers.

    /// The number of an instance that is known.
    #[must_use]
    pub fn number(&self, instance_id: &str) -> Option<WorkerId> {
        self.instances.get(instance_id).map(|instance| instance.number)
    }

    /// The number of an instance, from now on until [`Self::give_back`].
    pub fn claim(&mut self, instance_id: &Arc<str>) -> WorkerId {
        let instance = self.instance(instance_id);
        instance.claimed = true;
        instance.number
    }

    /// The owner does not use that instance's number any more. What is known of it stays while news of it comes.
    pub fn give_back(&mut self, instance_id: &str) {
        if let Some(instance) = self.instances.get_mut(instance_id) {
            instance.claimed = false;
            if !instance.fed {
                self.forget(instance_id);
            }
        }
    }

    /// Whether news of it comes, so that nothing has to be believed.
    #[must_use]
    pub fn is_fed(&self, instance_id: &str) -> bool {
        self.instances.get(instance_id).is_some_and(|instance| instance.fed)
    }

    /// What is known of each instance: the next event's number, or [`NOT_IN_STEP`].
    pub fn known(&self) -> impl Iterator<Item = (&Arc<str>, u64)> {
        let fed = self.instances.iter().filter(|(_, instance)| instance.fed);
        fed.map(|(name, instance)| (name, instance.next_sequence.unwrap_or(NOT_IN_STEP)))
    }

    /// The instance of that number.
    #[must_use]
    pub fn name(&self, number: WorkerId) -> Option<&Arc<str>> {
        self.names.get(number as usize)?.as_ref()
    }

    fn instance(&mut self, instance_id: &Arc<str>) -> &mut Instance {
        let (names, free) = (&mut self.names, &mut self.free);
        self.instances.entry(instance_id.clone()).or_insert_with(|| {
            let number = free.pop().unwrap_or_else(|| {
                names.push(None);
                (names.len() - 1) as WorkerId
            });
            names[number as usize] = Some(instance_id.clone());
            Instance {
                number,
                next_sequence: None,
                fed: false,
                claimed: false,
            }
        })
    }

    fn forget(&mut self, instance_id: &str) {
        if let Some(instance) = self.instances.remove(instance_id) {
            self.index.clear(instance.number);
            self.names[instance.number as usize] = None;
            self.free.push(instance.number);
        }
    }

    // Following.

    /// An instance can send events from `oldest` on; the next is `next`.
    pub fn follow(&mut self, instance_id: &Arc<str>, oldest: u64, next: u64) -> Want {
        let instance = self.instance(instance_id);
        instance.fed = true;
        match instance.next_sequence {
            Some(known) if oldest <= known && known <= next => Want::From(known),
            _ => {
                instance.next_sequence = None;
                Want::Snapshot
            }
        }
    }

    /// An event of an instance: whether it was news, and what is wanted when one before it is missing.
    pub fn apply(&mut self, instance_id: &str, event: &Event) -> Result<bool, Want> {
        let Some(instance) = self.instances.get_mut(instance_id) else {
            return Err(Want::Snapshot);
        };
        let Some(next) = instance.next_sequence else {
            // Nothing makes sense before the snapshot that was asked for; what matters of these is in it.
            return Ok(false);
        };
        if event.sequence < next {
            return Ok(false);
        }
        if event.sequence > next {
            self.gaps += 1;
            instance.next_sequence = None;
            return Err(Want::Snapshot);
        }
        instance.next_sequence = Some(next + 1);
        match &event.change {
            Change::Stored { parent, blocks } => self.index.store(instance.number, *parent, blocks),
            Change::Removed(blocks) => self.index.remove(instance.number, blocks),
            Change::Cleared => self.index.clear(instance.number),
        }
        Ok(true)
    }

    /// Whether a snapshot up to that event is news; then what was known is void, and the snapshot can be taken in, in parts,
    /// up to [`Self::end_snapshot`].
    pub fn begin_snapshot(&mut self, instance_id: &Arc<str>, next_sequence: u64) -> bool {
        let instance = self.instance(instance_id);
        // Late: more has been seen than it knows.
        if instance.next_sequence.is_some_and(|known| known > next_sequence) {
            return false;
        }
        instance.fed = true;
        instance.next_sequence = None;
        true
    }

    /// Voids some of what was known; true when nothing is left.
    pub fn clear_some(&mut self, instance_id: &str) -> bool {
        self.number(instance_id)
            .is_none_or(|number| self.index.clear_some(number, PART))
    }

    /// A part of a snapshot.
    pub fn store(&mut self, instance_id: &str, parent: u64, blocks: &[u64]) {
        if let Some(number) = self.number(instance_id) {
            self.index.store(number, parent, blocks);
        }
    }

    /// All of it has been taken in.
    pub fn end_snapshot(&mut self, instance_id: &str, next_sequence: u64) {
        if let Some(instance) = self.instances.get_mut(instance_id) {
            instance.next_sequence = Some(next_sequence);
        }
    }

    /// No more news of an instance comes.
    pub fn lose(&mut self, instance_id: &str) {
        let Some(instance) = self.instances.get_mut(instance_id) else {
            return;
        };
        if instance.claimed {
            self.index.clear(instance.number);
            instance.fed = false;
            instance.next_sequence = None;
        } else {
            self.forget(instance_id);
        }
    }

    /// No more news comes at all: what was known would only be wrong by and by.
    pub fn lose_all(&mut self) {
        let names: Vec<_> = self
            .instances
            .iter()
            .filter(|(_, each)| each.fed)
            .map(|(name, _)| name.clone())
            .collect();
        names.iter().for_each(|name| self.lose(name));
    }

    /// The number of an instance's next event; None when it is not known what it holds.
    #[must_use]
    pub fn next_sequence(&self, instance_id: &str) -> Option<u64> {
        self.instances.get(instance_id)?.next_sequence
    }

    /// What an instance holds as far as is known; None when it is not.
    #[must_use]
    pub fn snapshot(&self, instance_id: &str) -> Option<Snapshot> {
        let instance = self.instances.get(instance_id)?;
        let lists = self.index.held(instance.number);
        Some(Snapshot {
            next_sequence: instance.next_sequence?,
            chains: lists.into_iter().map(|list| (NO_BLOCK, list)).collect(),
        })
    }
}

/// Takes news in, in parts that are short: `with` runs each of them on the blocks, under a lock if need be. True when the
/// instance has been lost track of, and a snapshot is wanted.
pub fn take_in(news: &News, mut with: impl FnMut(&mut dyn FnMut(&mut Blocks))) -> bool {
    let id = &news.instance_id;
    if news.gone {
        with(&mut |blocks| blocks.lose(id));
        return false;
    }
    if let Some(snapshot) = &news.snapshot {
        let mut is_news = false;
        with(&mut |blocks| is_news = blocks.begin_snapshot(id, snapshot.next_sequence));
        if is_news {
            let mut cleared = false;
            while !cleared {
                with(&mut |blocks| cleared = blocks.clear_some(id));
            }
            for (parent, chain) in &snapshot.chains {
                let mut parent = *parent;
                for part in chain.chunks(PART) {
                    with(&mut |blocks| blocks.store(id, parent, part));
                    parent = part.last().copied().unwrap_or(parent);
                }
            }
            with(&mut |blocks| blocks.end_snapshot(id, snapshot.next_sequence));
        }
    }
    for event in &news.events {
        let mut lost = false;
        with(&mut |blocks| lost = blocks.apply(id, event).is_err());
        if lost {
            return true;
        }
    }
    false
}
