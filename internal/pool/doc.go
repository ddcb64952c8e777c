// Package pool holds the values that every part of shunt shares: what an
// endpoint is, what is known of it, and the immutable Snapshot that a request
// reads once. It decides nothing and starts nothing.
package pool
