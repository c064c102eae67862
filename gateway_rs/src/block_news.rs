//! Block news on the wire: what decides is [`headrace_core::blocks`]; here its values meet the messages of `cache.proto`.
//! Bytes in, bytes out, for each stream; no clock, no sockets.

use std::collections::HashSet;

use headrace_core::{
    blocks::{self, take_in, Blocks, Change, Event, Hello, Holder, Link, News, Snapshot, Want},
    index::Limits,
};
use prost::Message;

use crate::proto::{
    block_event::{Cleared, Removed, Stored, What},
    publish_blocks_response,
    watch_blocks_request::Known,
    watch_blocks_response, BlockEvent, BlockSnapshot, PublishBlocksRequest, PublishBlocksResponse, WatchBlocksRequest,
    WatchBlocksResponse,
};

/// Blocks that one message to a watcher names, more or less: 4 MiB.
const MESSAGE_BLOCKS: usize = 1 << 19;

/// The cache's hub behind its wire messages.
pub struct Hub {
    hub: blocks::Hub,
    /// Streams of watchers that have said what they know.
    watching: HashSet<Link>,
    /// Streams of workers that have said hello.
    joined: HashSet<Link>,
}

/// What a worker is to be sent, and the watchers that there is news for.
pub type Effects = (Option<Vec<u8>>, Vec<Link>);

impl Hub {
    /// Knows nobody.
    pub fn new(limits: Limits, seed: u64) -> Self {
        Self {
            hub: blocks::Hub::new(limits, seed),
            watching: HashSet::new(),
            joined: HashSet::new(),
        }
    }

    /// Who holds what.
    pub fn hub(&self) -> &blocks::Hub {
        &self.hub
    }

    /// A message of a worker's stream. Errors: why the stream must end, for people.
    pub fn worker_message(&mut self, link: Link, message: &[u8]) -> Result<Effects, String> {
        let message =
            PublishBlocksRequest::decode(message).map_err(|error| format!("not a PublishBlocksRequest: {error}"))?;
        let (mut want, mut woken) = (None, Vec::new());
        if !self.joined.contains(&link) {
            let hello = message.hello.ok_or("the first message must have a hello")?;
            let fields = [
                ("worker_id", &hello.worker_id),
                ("instance_id", &hello.instance_id),
                ("pool", &hello.pool),
            ];
            let missing: Vec<&str> = fields
                .iter()
                .filter(|(_, value)| value.is_empty())
                .map(|(name, _)| *name)
                .collect();
            if !missing.is_empty() {
                return Err(format!("hello: {} must not be empty", missing.join(", ")));
            }
            self.joined.insert(link);
            let hello = Hello {
                worker_id: hello.worker_id.into(),
                instance_id: hello.instance_id.into(),
                pool: hello.pool.into(),
                oldest_sequence: hello.oldest_sequence,
                next_sequence: hello.next_sequence,
            };
            want = Some(self.hub.hello(link, &hello, &mut woken));
        }
        if let Some(from) = message.snapshot {
            self.hub.snapshot(link, snapshot(from), &mut woken);
        }
        if !message.events.is_empty() {
            let events = message.events.into_iter().map(event).collect();
            want = self.hub.events(link, events, &mut woken).or(want);
        }
        Ok((want.map(want_message), woken))
    }

    /// A worker's stream has ended.
    pub fn worker_lost(&mut self, now_s: f64, link: Link) {
        self.joined.remove(&link);
        self.hub.lost(now_s, link);
    }

    /// A message of a watcher's stream, for which there may be news now. Errors: why the stream must end, for people.
    pub fn watcher_message(&mut self, now_s: f64, link: Link, message: &[u8]) -> Result<(), String> {
        let message =
            WatchBlocksRequest::decode(message).map_err(|error| format!("not a WatchBlocksRequest: {error}"))?;
        if self.watching.insert(link) {
            let known = message
                .known
                .into_iter()
                .map(|known| (known.instance_id.into(), known.next_sequence));
            self.hub.watch(now_s, link, known.collect());
        }
        for id in message.lost {
            self.hub.lost_track(link, &id.into());
        }
        Ok(())
    }

    /// A watcher's stream has ended.
    pub fn watcher_lost(&mut self, link: Link) {
        self.watching.remove(&link);
        self.hub.unwatch(link);
    }

    /// What a watcher is to hear next, and whether there is more: a message, empty when there is nothing.
    pub fn news(&mut self, link: Link) -> (Vec<u8>, bool) {
        let news = self.hub.news(link, MESSAGE_BLOCKS);
        let news = news.into_iter().map(news_message).collect();
        (WatchBlocksResponse { news }.encode_to_vec(), self.hub.owes(link))
    }

    /// Time has passed; returns the watchers that there is news for.
    pub fn tick(&mut self, now_s: f64) -> Vec<Link> {
        let mut woken = Vec::new();
        self.hub.expire(now_s, &mut woken);
        woken
    }

    /// Who holds the beginning of a prefix, longest first.
    pub fn find(&self, pool: &str, hashes: &[u64]) -> Vec<Holder> {
        self.hub.find(pool, hashes)
    }
}

/// The first message of a watcher: what it knows.
pub fn known(blocks: &Blocks) -> WatchBlocksRequest {
    let known = blocks.known().map(|(id, next_sequence)| Known {
        instance_id: id.to_string(),
        next_sequence,
    });
    WatchBlocksRequest {
        known: known.collect(),
        lost: Vec::new(),
    }
}

/// Takes a message in; `with` runs short pieces of work on the blocks, under a lock if need be. What has to be answered, if
/// something was missing.
pub fn receive(
    message: WatchBlocksResponse,
    mut with: impl FnMut(&mut dyn FnMut(&mut Blocks)),
) -> Option<WatchBlocksRequest> {
    let mut lost = Vec::new();
    for each in message.news {
        let news = News {
            instance_id: each.instance_id.into(),
            gone: each.gone,
            snapshot: each.snapshot.map(snapshot),
            events: each.events.into_iter().map(event).collect(),
        };
        if take_in(&news, &mut with) {
            lost.push(news.instance_id.to_string());
        }
    }
    (!lost.is_empty()).then(|| WatchBlocksRequest {
        known: Vec::new(),
        lost,
    })
}

fn want_message(want: Want) -> Vec<u8> {
    let want = match want {
        Want::From(sequence) => publish_blocks_response::Want::ResumeFrom(sequence),
        Want::Snapshot => publish_blocks_response::Want::Snapshot(true),
    };
    PublishBlocksResponse { want: Some(want) }.encode_to_vec()
}

fn event(from: BlockEvent) -> Event {
    let change = match from.what {
        Some(What::Removed(removed)) => Change::Removed(removed.hashes),
        Some(What::Cleared(_)) => Change::Cleared,
        Some(What::Stored(stored)) => Change::Stored {
            parent: stored.parent,
            blocks: stored.hashes,
        },
        // Of a later version: it counts, and says nothing that we understand.
        None => Change::Removed(Vec::new()),
    };
    Event {
        sequence: from.sequence,
        change,
    }
}

fn snapshot(from: BlockSnapshot) -> Snapshot {
    Snapshot {
        next_sequence: from.next_sequence,
        chains: from
            .chains
            .into_iter()
            .map(|chain| (chain.parent, chain.hashes))
            .collect(),
    }
}

fn news_message(news: News) -> watch_blocks_response::News {
    let stored = |(parent, hashes)| Stored { parent, hashes };
    watch_blocks_response::News {
        instance_id: news.instance_id.to_string(),
        gone: news.gone,
        snapshot: news.snapshot.map(|snapshot| BlockSnapshot {
            next_sequence: snapshot.next_sequence,
            chains: snapshot.chains.into_iter().map(stored).collect(),
        }),
        events: news.events.into_iter().map(event_message).collect(),
    }
}

fn event_message(event: Event) -> BlockEvent {
    let what = match event.change {
        Change::Stored { parent, blocks } => What::Stored(Stored { parent, hashes: blocks }),
        Change::Removed(hashes) => What::Removed(Removed { hashes }),
        Change::Cleared => What::Cleared(Cleared {}),
    };
    BlockEvent {
        sequence: event.sequence,
        what: Some(what),
    }
}
