//! The link to the cache: "what do we already have?" One `Lookup` stream for answers, one `WatchBlocks` stream for who holds
//! which prefix blocks.
//!
//! The cache being away is never an error of a request: an ask then gets [`Found::Nothing`] at once and the request goes on.
//! What is known of blocks is used for a little longer.

use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{channel, shares::SharedBlocks, Backoff, Outbox, MAX_MESSAGE_BYTES};
use crate::{
    block_news,
    plane::tls::Tls,
    proto::{
        cache_service_client::CacheServiceClient,
        lookup_request::{Ask, Fill},
        lookup_response::{reply::What, Reply},
        Answer, LookupRequest, TraceContext, WatchBlocksRequest,
    },
};

/// So long what is known of blocks is used while the cache is away: afterwards it would be wrong too often.
const BLOCKS_LAST: Duration = Duration::from_secs(10);

/// This router's side of the `Lookup` stream.
pub struct Cache {
    address: String,
    tls: Option<Arc<Tls>>,
    outbox: Arc<Outbox<LookupRequest>>,
    next_ask: AtomicU64,
    /// None while there is no connection.
    asks: Mutex<Option<HashMap<u64, oneshot::Sender<Found>>>>,
}

/// What the cache knows.
pub enum Found {
    /// The answer.
    Hit(Answer),
    /// Nobody has it: generate it, then fill or abandon.
    Lead(Lead),
    /// The cache cannot be asked.
    Nothing,
}

/// The duty to fill a key. Dropping it abandons.
pub struct Lead {
    cache: Arc<Cache>,
    ask: u64,
    filled: bool,
}

impl Cache {
    /// Starts the link. What is heard of blocks goes into `blocks`.
    pub fn start(address: String, tls: Option<Arc<Tls>>, blocks: SharedBlocks) -> Arc<Self> {
        let cache = Arc::new(Self {
            address,
            tls,
            outbox: Arc::new(Outbox::default()),
            next_ask: AtomicU64::new(1),
            asks: Mutex::new(None),
        });
        tokio::spawn(cache.clone().keep());
        tokio::spawn(cache.clone().watch(blocks));
        cache
    }

    /// Asks for that key; waits while another request generates it. Dropping the future withdraws the ask.
    pub async fn ask(self: &Arc<Self>, key: bytes::Bytes, traceparent: String) -> Found {
        let ask = self.next_ask.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        match self.asks.lock().as_mut() {
            Some(asks) => asks.insert(ask, sender),
            None => return Found::Nothing,
        };
        let trace = (!traceparent.is_empty()).then(|| TraceContext {
            traceparent,
            ..TraceContext::default()
        });
        self.outbox
            .add(128, |message| message.asks.push(Ask { ask, key, trace }));
        let mut withdrawal = Withdrawal {
            cache: self,
            ask,
            answered: false,
        };
        let found = receiver.await.unwrap_or(Found::Nothing);
        withdrawal.answered = true;
        found
    }

    async fn keep(self: Arc<Self>) {
        let mut backoff = Backoff::default();
        loop {
            if let Err(reason) = self.read(&mut backoff).await {
                crate::plane::log::warn(&format!("cache {}: {reason}", self.address));
            }
            // Those who wait go on without: their senders are dropped here.
            self.asks.lock().take();
            self.outbox.clear();
            backoff.wait().await;
        }
    }

    async fn read(self: &Arc<Self>, backoff: &mut Backoff) -> Result<(), String> {
        let channel = channel(&self.address, self.tls.as_ref()).map_err(|error| error.to_string())?;
        let mut client = CacheServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        // An empty first message opens the stream on the server's side.
        let outgoing = self.outbox.open(|_| vec![LookupRequest::default()]);
        let mut responses = client
            .lookup(outgoing)
            .await
            .map_err(|status| status.to_string())?
            .into_inner();
        self.asks.lock().get_or_insert_with(HashMap::new);
        backoff.reset();
        while let Some(response) = responses.message().await.map_err(|status| status.to_string())? {
            for reply in response.replies {
                self.answer(reply);
            }
        }
        Err("the stream was closed".to_owned())
    }

    /// Follows who holds which blocks.
    async fn watch(self: Arc<Self>, blocks: SharedBlocks) {
        let mut backoff = Backoff::default();
        let mut away_since = Instant::now();
        loop {
            let mut connected = false;
            // Why the cache is away, the other stream says.
            let _ = self.follow(&blocks, &mut backoff, &mut connected).await;
            if connected {
                away_since = Instant::now();
            }
            if away_since.elapsed() > BLOCKS_LAST {
                blocks.write().lose_all();
            }
            backoff.wait().await;
        }
    }

    async fn follow(
        &self,
        blocks: &SharedBlocks,
        backoff: &mut Backoff,
        connected: &mut bool,
    ) -> Result<(), tonic::Status> {
        let failed = |reason: String| tonic::Status::internal(reason);
        let channel = channel(&self.address, self.tls.as_ref()).map_err(|error| failed(error.to_string()))?;
        let mut client = CacheServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let outbox = Arc::new(Outbox::<WatchBlocksRequest>::default());
        let known = block_news::known(&blocks.read());
        let outgoing = outbox.open(|_| vec![known]);
        let mut responses = client.watch_blocks(outgoing).await?.into_inner();
        while let Some(response) = responses.message().await? {
            *connected = true;
            backoff.reset();
            let blocks = blocks.clone();
            // What a worker holds can be long.
            let taken_in =
                tokio::task::spawn_blocking(move || block_news::receive(response, |work| work(&mut blocks.write())));
            if let Some(lost) = taken_in.await.map_err(|error| failed(error.to_string()))? {
                outbox.add(64, |message| message.lost.extend(lost.lost));
            }
        }
        Ok(())
    }

    fn answer(self: &Arc<Self>, reply: Reply) {
        let sender = self.asks.lock().as_mut().and_then(|asks| asks.remove(&reply.ask));
        let found = match reply.what {
            Some(What::Hit(answer)) => Found::Hit(answer),
            Some(What::Lead(_)) => Found::Lead(Lead {
                cache: self.clone(),
                ask: reply.ask,
                filled: false,
            }),
            None => Found::Nothing,
        };
        // Nobody waits any more: a lead is abandoned by being dropped.
        if let Some(sender) = sender {
            let _ = sender.send(found);
        }
    }
}

struct Withdrawal<'a> {
    cache: &'a Arc<Cache>,
    ask: u64,
    answered: bool,
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        let waiting = |asks: &mut HashMap<u64, _>| asks.remove(&self.ask).is_some();
        if !self.answered && self.cache.asks.lock().as_mut().is_some_and(waiting) {
            self.cache.outbox.add(8, |message| message.withdrawals.push(self.ask));
        }
    }
}

impl Lead {
    /// The answer is finished: it may be given again.
    pub fn fill(mut self, answer: Answer) {
        self.filled = true;
        let bytes = 64 + answer.choices.iter().map(|choice| choice.ids.len() * 4).sum::<usize>();
        let fill = Fill {
            ask: self.ask,
            answer: Some(answer),
        };
        self.cache.outbox.add(bytes, |message| message.fills.push(fill));
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !self.filled {
            self.cache.outbox.add(8, |message| message.abandons.push(self.ask));
        }
    }
}
