//! The wire contracts of `proto/headrace/v1`, compiled by `build.rs`.
#![allow(missing_docs, clippy::all, clippy::pedantic)]

tonic::include_proto!("headrace.v1");

/// All of `proto/headrace/v1` as a serialized `FileDescriptorSet`, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/headrace.v1.bin"));
