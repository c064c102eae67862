//! Compiles `proto/` with a compiler written in Rust: no `protoc` is needed on the machine.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../proto");
    let files = ["types", "router", "batches", "worker", "scheduler", "cache"]
        .map(|name| root.join(format!("headrace/v1/{name}.proto")));
    println!("cargo:rerun-if-changed={}", root.display());
    let descriptors = protox::compile(files, [&root])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("headrace.v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".headrace.v1.LookupRequest.Ask.key")
        .bytes(".headrace.v1.UploadFileRequest.data")
        .bytes(".headrace.v1.DownloadFileResponse.data")
        // Most deltas have none: without it a frame of a thousand is a third as large in memory.
        .boxed(".headrace.v1.TokenDelta.finish")
        .compile_fds(descriptors)?;
    Ok(())
}
