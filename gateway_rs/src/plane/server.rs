//! Start, serve, drain, stop: the data plane as one thing that Python holds.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs},
    sync::{atomic::Ordering, Arc},
    time::{Duration, Instant},
};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{
        conn::auto,
        graceful::{GracefulShutdown, Watcher},
    },
    service::TowerToHyperService,
};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener},
    runtime::Runtime,
    task::{unconstrained, JoinHandle},
};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use super::{
    batches::Standing,
    compute::Compute,
    config::{AliasConfig, PlaneConfig},
    grpc, http, log,
    model::Model,
    opening::Opening,
    tls::{Entrance, Tls},
    Plane,
};
use crate::memory;

/// Connections that wait to be accepted. A burst of a few thousand clients must not meet a full queue (the kernel caps it).
const BACKLOG: i32 = 4096;

/// A client's request headers, in bytes.
const MAX_HEADER_BYTES: usize = 64 * 1024;

/// The running data plane.
pub struct Server {
    runtime: Runtime,
    computing: Runtime,
    plane: Arc<Plane>,
    /// Stops taking connections.
    closing: CancellationToken,
    servers: Vec<JoinHandle<()>>,
    /// Where HTTP is served.
    pub http_address: SocketAddr,
    /// Where gRPC is served.
    pub grpc_address: SocketAddr,
}

impl Server {
    /// Loads the models, opens both ports and the links. The error is for people: which setting, and why.
    pub fn start(config: PlaneConfig) -> Result<Self, String> {
        log::set_level(&config.telemetry.log_level);
        let load = |folder| Model::load(&config, folder);
        let models = config.models.iter().map(load).collect::<Result<Vec<_>, _>>()?;
        for model in &models {
            log::info(&format!("model {}: tokenizer {}", model.name, model.tokenizer.plan()));
        }
        let threads = match config.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let no_threads = |error| format!("cannot start threads: {error}");
        let computing = Compute::runtime(threads).map_err(no_threads)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("headrace-plane")
            .enable_all()
            .build()
            .map_err(no_threads)?;
        let inside = runtime.enter();
        let header_timeout = Duration::from_secs_f64(config.header_timeout_s);
        let tls = config
            .tls
            .as_ref()
            .map(|tls| Tls::load(tls, header_timeout))
            .transpose()?;
        let tls = tls.map(Arc::new);
        let doors = tls.clone().filter(|_| config.tls.as_ref().is_some_and(|tls| tls.doors));
        let http = listen(&config.http_address)
            .map_err(|error| cannot_listen("router.http_address", &config.http_address, &error))?;
        let grpc = listen(&config.grpc_address)
            .map_err(|error| cannot_listen("router.grpc_address", &config.grpc_address, &error))?;
        let address = |listener: &TcpListener| listener.local_addr().map_err(|error| error.to_string());
        let (http_address, grpc_address) = (address(&http)?, address(&grpc)?);
        let inner = config.batches.as_ref().map(|batches| {
            UnixListener::bind(&batches.door).map_err(|error| format!("cannot listen on {:?}: {error}", batches.door))
        });
        let inner = inner.transpose()?;
        let plane = Plane::start(config, models, tls.clone(), Compute::new(&computing))?;
        let closing = CancellationToken::new();
        // A turn takes all that wait to be accepted: in turns of a bounded length a burst of clients, each of whom at once
        // has a task of its own before the next turn, fills the queue.
        let mut servers = vec![
            tokio::spawn(unconstrained(serve_http(
                plane.clone(),
                http,
                doors.clone(),
                closing.clone(),
            ))),
            tokio::spawn(unconstrained(grpc::serve(plane.clone(), grpc, doors, closing.clone()))),
        ];
        if let Some(listener) = inner {
            servers.push(tokio::spawn(serve_inner(plane.clone(), listener, closing.clone())));
        }
        // Both end with the runtime.
        tokio::spawn(plane.tenants.clone().watch());
        tokio::spawn(tidy());
        if let Some(tls) = tls {
            tokio::spawn(tls.watch());
        }
        drop(inside);
        Ok(Self {
            runtime,
            computing,
            plane,
            closing,
            servers,
            http_address,
            grpc_address,
        })
    }

    /// Puts these names with several variants in the place of the former ones. The error is for people.
    pub fn set_aliases(&self, aliases: &[AliasConfig]) -> Result<(), String> {
        self.plane.routes.set(aliases, &self.plane.metrics)
    }

    /// What the keeper of files and batches says of them.
    pub fn show_batches(&self, standing: &Standing) {
        standing.show(&self.plane.metrics);
    }

    /// Leaves politely: not ready, then no new connections, then open streams end within the grace, then the rest is told.
    pub fn drain(&self) {
        let config = &self.plane.config;
        self.plane.draining.store(true, Ordering::Relaxed);
        std::thread::sleep(Duration::from_secs_f64(config.settle_s));
        self.closing.cancel();
        let until = Instant::now() + Duration::from_secs_f64(config.drain_grace_s);
        self.wait_idle(until);
        self.plane.stop();
        // Those that were told get a moment to read it.
        self.wait_idle(Instant::now() + Duration::from_secs(2));
    }

    fn wait_idle(&self, until: Instant) {
        while !self.plane.is_idle() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends everything at once.
    pub fn stop(mut self) {
        self.closing.cancel();
        self.plane.stop();
        let servers = std::mem::take(&mut self.servers);
        self.runtime.block_on(async {
            let all = futures_util::future::join_all(servers);
            let _ = tokio::time::timeout(Duration::from_secs(1), all).await;
            // The books of the last requests are worth a moment.
            let _ = tokio::time::timeout(Duration::from_secs(1), self.plane.scheduler.close()).await;
        });
        self.plane.tracing.stop();
        self.runtime.shutdown_timeout(Duration::from_secs(1));
        self.computing.shutdown_timeout(Duration::from_secs(1));
    }
}

/// Between looks at free memory.
const TIDY_EVERY: Duration = Duration::from_millis(250);

async fn tidy() {
    loop {
        tokio::time::sleep(TIDY_EVERY).await;
        memory::tidy();
    }
}

fn cannot_listen(key: &str, address: &str, error: &io::Error) -> String {
    format!("{key}: cannot listen on {address}: {error}")
}

fn listen(address: &str) -> io::Result<TcpListener> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "no such address");
    let address = address.to_socket_addrs()?.next().ok_or_else(missing)?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// How HTTP is spoken.
fn http_builder(plane: &Plane) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    let header_timeout = Duration::from_secs_f64(plane.config.header_timeout_s);
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(MAX_HEADER_BYTES)
        // An event is one small chunk: copied together with its frame it costs less than the vector of its three parts.
        .writev(false)
        .keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEADER_BYTES as u32)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(10));
    builder
}

/// The inner door: for this process's own work, until told to close.
async fn serve_inner(plane: Arc<Plane>, listener: UnixListener, closing: CancellationToken) {
    let (routes, builder) = (http::inner_routes(plane.clone()), http_builder(&plane));
    let graceful = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            () = closing.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    log::warn(&format!("cannot accept a connection: {error}"));
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let (routes, builder, watcher) = (routes.clone(), builder.clone(), graceful.watcher());
        tokio::spawn(async move { serve_connection(stream, &builder, routes, watcher).await });
    }
    tokio::select! {
        () = graceful.shutdown() => {}
        () = plane.stopped() => {}
    }
}

async fn serve_http(plane: Arc<Plane>, listener: TcpListener, tls: Option<Arc<Tls>>, closing: CancellationToken) {
    let (routes, builder) = (http::routes(plane.clone()), http_builder(&plane));
    let header_timeout = Duration::from_secs_f64(plane.config.header_timeout_s);
    let graceful = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            () = closing.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely: those that are open must end first.
                    log::warn(&format!("cannot accept a connection: {error}"));
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let watcher = graceful.watcher();
        let (routes, builder, plane, tls) = (routes.clone(), builder.clone(), plane.clone(), tls.clone());
        tokio::spawn(async move {
            plane.metrics.connections.inc();
            let stream = prompt(stream);
            if let Some(tls) = tls {
                if let Some(stream) = tls.accept(Entrance::Http, stream).await {
                    let stream = Opening::new(stream, header_timeout);
                    serve_connection(stream, &builder, routes, watcher).await;
                }
            } else {
                let stream = Opening::new(stream, header_timeout);
                serve_connection(stream, &builder, routes, watcher).await;
            }
            plane.metrics.connections.dec();
        });
    }
    drop(listener);
    tokio::select! {
        () = graceful.shutdown() => {}
        () = plane.stopped() => {}
    }
}

async fn serve_connection<S>(stream: S, builder: &auto::Builder<TokioExecutor>, routes: Router, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = TowerToHyperService::new(routes);
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    // A client's broken connection is its own affair.
    let _ = watcher.watch(connection).await;
}

/// A token must not wait for the next one: without this, the first of an answer waits 40 ms for the client's ACK.
pub fn prompt(stream: TcpStream) -> TcpStream {
    if let Err(error) = stream.set_nodelay(true) {
        log::warn(&format!("TCP_NODELAY: {error}"));
    }
    stream
}

/// Accepted connections, as tonic wants them.
pub fn incoming(listener: TcpListener) -> impl futures_core::Stream<Item = io::Result<TcpStream>> {
    tokio_stream::wrappers::TcpListenerStream::new(listener).map(|stream| stream.map(prompt))
}
