//! TLS of the doors and the links: this process's certificate, read from files and read again when those change.
//!
//! New connections use what the files hold now; those that are open go on with what they began with. Files that cannot be
//! used (a key of another certificate, one that has expired, one half written) are told of once and leave the former in
//! force. Links are always mutual: both sides show a certificate of the same authority. Python's side of the links
//! (`services/headrace/tls.py`) gets its files from here too, so that one rule says what is usable.
//!
//! What is deliberately absent: revocation lists, and certificates of different issuers for doors and links.

use std::{
    fs, io,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, RwLock};
use rustls::{
    client::verify_server_cert_signed_by_trust_anchor,
    crypto::{ring, CryptoProvider},
    pki_types::{pem::PemObject, CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{danger::ClientCertVerifier, ParsedCertificate, WebPkiClientVerifier},
    sign::CertifiedKey,
    CertificateError, ClientConfig, RootCertStore, ServerConfig,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{mpsc, Semaphore},
};
use tokio_rustls::{client, server, TlsAcceptor, TlsConnector};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::{Connected, TcpConnectInfo};

use super::{
    config::TlsConfig,
    files::{mark, Mark, LOOK_EVERY},
    log,
    server::prompt,
};

/// How often failed handshakes are told of.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// Clients that may be in the middle of a handshake; one more is hung up on. As many as may wait to be accepted.
const MAX_HANDSHAKES: usize = 4096;

/// Connections that are ready for the gRPC server and not yet taken.
const MAX_READY: usize = 64;

/// PEM files.
#[derive(Clone, Debug)]
pub struct Files {
    /// This process's certificate, and those between it and the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Who may issue peers' certificates.
    pub authority: PathBuf,
}

impl Files {
    fn marks(&self) -> [Mark; 3] {
        [&self.certificate, &self.key, &self.authority].map(|path| mark(path))
    }
}

/// What the files hold, in a state that peers accept.
pub struct Material {
    /// As in the files.
    pub certificate_pem: Vec<u8>,
    /// As in the files.
    pub key_pem: Vec<u8>,
    /// As in the files.
    pub authority_pem: Vec<u8>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Arc<RootCertStore>,
}

impl Material {
    /// Reads and checks all three. The error is for people: which setting, and why.
    fn read(files: &Files) -> Result<Self, String> {
        let certificate_pem = read(&files.certificate, "certificate")?;
        let key_pem = read(&files.key, "key")?;
        let authority_pem = read(&files.authority, "authority")?;
        let (certificate, key_path, authority) = (
            files.certificate.display(),
            files.key.display(),
            files.authority.display(),
        );
        let chain =
            certificates(&certificate_pem).map_err(|why| format!("tls.certificate: {certificate} has {why}"))?;
        let issuers = certificates(&authority_pem).map_err(|why| format!("tls.authority: {authority} has {why}"))?;
        let key = PrivateKeyDer::from_pem_slice(&key_pem)
            .map_err(|_| format!("tls.key: {key_path} has no private key that can be read (encrypted ones cannot)"))?;
        let mut roots = RootCertStore::empty();
        for issuer in issuers {
            roots
                .add(issuer)
                .map_err(|error| format!("tls.authority: {authority} has a certificate of no use: {error}"))?;
        }
        let roots = Arc::new(roots);
        CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider()).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => format!("tls.key: {key_path} is not the key of {certificate}"),
            other => format!("tls.key: {key_path} cannot be used: {other}"),
        })?;
        check_chain(&chain, &roots).map_err(|error| format!("tls.certificate: {certificate} {}", reason(&error)))?;
        Ok(Self {
            certificate_pem,
            key_pem,
            authority_pem,
            chain,
            key,
            roots,
        })
    }
}

fn read(path: &PathBuf, key: &str) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("tls.{key}: cannot read {}: {error}", path.display()))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| format!("a certificate that cannot be read: {error}"))?;
    match found.is_empty() {
        true => Err("no certificate".to_owned()),
        false => Ok(found),
    }
}

/// What a peer with the same authority will do, as a client and as a server.
fn check_chain(chain: &[CertificateDer<'static>], roots: &Arc<RootCertStore>) -> Result<(), rustls::Error> {
    let Some((leaf, between)) = chain.split_first() else {
        return Err(CertificateError::BadEncoding.into());
    };
    let now = UnixTime::now();
    let algorithms = provider().signature_verification_algorithms;
    verify_server_cert_signed_by_trust_anchor(
        &ParsedCertificate::try_from(leaf)?,
        roots,
        between,
        now,
        algorithms.all,
    )?;
    verifier(roots)?.verify_client_cert(leaf, between, now).map(|_| ())
}

fn reason(error: &rustls::Error) -> String {
    let rustls::Error::InvalidCertificate(error) = error else {
        return format!("cannot be used: {error}");
    };
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired".to_owned(),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => "is not valid yet".to_owned(),
        CertificateError::UnknownIssuer => "was issued by none of tls.authority".to_owned(),
        other => format!("would be refused by every peer: {other}"),
    }
}

fn provider() -> Arc<CryptoProvider> {
    static RING: std::sync::OnceLock<Arc<CryptoProvider>> = std::sync::OnceLock::new();
    RING.get_or_init(|| Arc::new(ring::default_provider())).clone()
}

fn verifier(roots: &Arc<RootCertStore>) -> Result<Arc<dyn ClientCertVerifier>, rustls::Error> {
    WebPkiClientVerifier::builder_with_provider(roots.clone(), provider())
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))
}

/// The files, and what they last held that was usable.
pub struct Certificates {
    files: Files,
    state: Mutex<State>,
}

struct State {
    current: Arc<Material>,
    marks: [Mark; 3],
    /// The state of the files that could not be used, and whether that was told.
    refused: Option<([Mark; 3], bool)>,
}

/// What a look at the files found.
pub enum Look {
    /// Nothing to tell.
    Same,
    /// They are used from now on.
    Fresh(Arc<Material>),
    /// They cannot be used, for this reason; the former are still in force. Told once.
    Refused(String),
}

impl Certificates {
    /// The error is for people: which setting, and why.
    pub fn load(files: Files) -> Result<Self, String> {
        // Before reading: a change in between is seen by the next look.
        let marks = files.marks();
        let current = Arc::new(Material::read(&files)?);
        let state = State {
            current,
            marks,
            refused: None,
        };
        Ok(Self {
            files,
            state: Mutex::new(state),
        })
    }

    /// In force now.
    pub fn current(&self) -> Arc<Material> {
        self.state.lock().current.clone()
    }

    /// Looks at the files, and reads them when they have changed.
    pub fn refresh(&self) -> Look {
        let mut state = self.state.lock();
        let marks = self.files.marks();
        if marks == state.marks {
            state.refused = None;
            return Look::Same;
        }
        match Material::read(&self.files) {
            Ok(material) => {
                let current = Arc::new(material);
                *state = State {
                    current: current.clone(),
                    marks,
                    refused: None,
                };
                Look::Fresh(current)
            }
            Err(reason) => {
                // The certificate is there before its key is: what stays so until the next look is worth telling.
                let (stays, told) = match state.refused {
                    Some((seen, told)) if seen == marks => (true, told),
                    _ => (false, false),
                };
                state.refused = Some((marks, stays));
                match stays && !told {
                    true => Look::Refused(reason),
                    false => Look::Same,
                }
            }
        }
    }
}

/// Which door a client comes in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrance {
    /// HTTP/1.1 or HTTP/2.
    Http,
    /// HTTP/2 only.
    Grpc,
}

/// The doors' and links' TLS.
pub struct Tls {
    certificates: Certificates,
    client_certificates: bool,
    /// Empty: the host of the peer's address.
    server_name: String,
    handshakes: Semaphore,
    timeout: Duration,
    failures: Mutex<Failures>,
    in_force: RwLock<InForce>,
}

/// Since they were last told of.
#[derive(Default)]
struct Failures {
    count: u64,
    told: Option<Instant>,
}

#[derive(Clone)]
struct InForce {
    http: Arc<ServerConfig>,
    grpc: Arc<ServerConfig>,
    links: Arc<ClientConfig>,
}

impl InForce {
    fn new(material: &Material, client_certificates: bool) -> Result<Self, rustls::Error> {
        let server = |protocols: &[&str]| {
            let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
            let builder = match client_certificates {
                true => builder.with_client_cert_verifier(verifier(&material.roots)?),
                false => builder.with_no_client_auth(),
            };
            let mut config = builder.with_single_cert(material.chain.clone(), material.key.clone_key())?;
            config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
            Ok::<_, rustls::Error>(Arc::new(config))
        };
        let mut links = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(material.roots.clone())
            .with_client_auth_cert(material.chain.clone(), material.key.clone_key())?;
        links.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self {
            http: server(&["h2", "http/1.1"])?,
            grpc: server(&["h2"])?,
            links: Arc::new(links),
        })
    }
}

impl Tls {
    /// `timeout` is a client's time for its handshake and the first byte after it. The error is for people: which
    /// setting, and why.
    pub fn load(config: &TlsConfig, timeout: Duration) -> Result<Self, String> {
        if !config.server_name.is_empty() {
            ServerName::try_from(config.server_name.as_str())
                .map_err(|error| format!("tls.server_name: {}: {error}", config.server_name))?;
        }
        let certificates = Certificates::load(Files {
            certificate: config.certificate.clone(),
            key: config.key.clone(),
            authority: config.authority.clone(),
        })?;
        let in_force = InForce::new(&certificates.current(), config.client_certificates)
            .map_err(|error| format!("tls.certificate: {error}"))?;
        Ok(Self {
            certificates,
            client_certificates: config.client_certificates,
            server_name: config.server_name.clone(),
            handshakes: Semaphore::new(MAX_HANDSHAKES),
            timeout,
            failures: Mutex::default(),
            in_force: RwLock::new(in_force),
        })
    }

    /// Looks at the files for as long as the process serves.
    pub async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let tls = self.clone();
            // Files may be slow to answer; streams must not wait for them.
            if tokio::task::spawn_blocking(move || tls.refresh()).await.is_err() {
                log::warn("TLS: looking at the certificates failed");
            }
        }
    }

    fn refresh(&self) {
        match self.certificates.refresh() {
            Look::Same => {}
            Look::Fresh(material) => match InForce::new(&material, self.client_certificates) {
                Ok(fresh) => {
                    *self.in_force.write() = fresh;
                    log::info("TLS: new certificates are in force");
                }
                Err(error) => log::warn(&format!("TLS: the former certificates stay in force: {error}")),
            },
            Look::Refused(reason) => log::warn(&format!("TLS: the former certificates stay in force: {reason}")),
        }
    }

    /// A client's connection after its handshake, once its first byte is there; None when it did not get so far.
    pub async fn accept(&self, entrance: Entrance, stream: TcpStream) -> Option<server::TlsStream<TcpStream>> {
        let config = {
            let in_force = self.in_force.read();
            match entrance {
                Entrance::Http => in_force.http.clone(),
                Entrance::Grpc => in_force.grpc.clone(),
            }
        };
        let shaken = async {
            let shaking = self.handshakes.try_acquire();
            let shaking = shaking.map_err(|_| io::Error::other(format!("{MAX_HANDSHAKES} are under way")))?;
            let mut stream = TlsAcceptor::from(config).accept(stream).await?;
            drop(shaking);
            let begun = !stream.fill_buf().await?.is_empty();
            io::Result::Ok(begun.then_some(stream))
        };
        match tokio::time::timeout(self.timeout, shaken).await {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) => self.failed(&error),
            // Silent ones are no news.
            Err(_) => None,
        }
    }

    /// Tells of clients' handshakes that failed, not of each: a door has many knocking that are no clients.
    fn failed(&self, error: &io::Error) -> Option<server::TlsStream<TcpStream>> {
        let mut failures = self.failures.lock();
        failures.count += 1;
        if failures.told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
            log::info(&format!(
                "TLS: {} handshakes of clients failed, the last: {error}",
                failures.count
            ));
            *failures = Failures {
                count: 0,
                told: Some(Instant::now()),
            };
        }
        None
    }

    /// Accepted connections, as tonic wants them. Handshakes run side by side, each in a task that its timeout ends.
    pub fn incoming(
        self: Arc<Self>,
        listener: TcpListener,
        closing: CancellationToken,
    ) -> ReceiverStream<io::Result<Secured>> {
        let (ready, incoming) = mpsc::channel(MAX_READY);
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    () = closing.cancelled() => break,
                    () = ready.closed() => break,
                    accepted = listener.accept() => accepted,
                };
                let Ok((stream, _)) = accepted else {
                    // Out of descriptors, most likely: those that are open must end first.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let (tls, ready) = (self.clone(), ready.clone());
                tokio::spawn(async move {
                    if let Some(stream) = tls.accept(Entrance::Grpc, prompt(stream)).await {
                        let _ = ready.send(Ok(Secured(stream))).await;
                    }
                });
            }
        });
        ReceiverStream::new(incoming)
    }

    /// A connection to another service at `address` (`host:port`), which must prove to be one. The caller bounds the time.
    pub async fn connect(self: Arc<Self>, address: String) -> io::Result<TokioIo<client::TlsStream<TcpStream>>> {
        let host = match self.server_name.as_str() {
            "" => address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host),
            name => name,
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let stream = prompt(TcpStream::connect(&address).await?);
        let config = self.in_force.read().links.clone();
        Ok(TokioIo::new(TlsConnector::from(config).connect(name, stream).await?))
    }
}

/// A client's connection, as tonic wants it.
pub struct Secured(server::TlsStream<TcpStream>);

impl Connected for Secured {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.0.get_ref().0.connect_info()
    }
}

impl AsyncRead for Secured {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
