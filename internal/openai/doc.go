// Package openai reads the bodies of inference requests and responses, in place and in one pass.
//
// A request body is scanned by a [Scan]: a resumable state machine that is fed the body's chunks as they lie in
// the proxy's buffers, keeps sizes, offsets and flags, and hands the routing text on to a [Sink] without storing
// it. Which fields matter is said by one table of endpoints ([Lookup]). A response body is watched by a [Usage],
// which works on JSON and server-sent events alike. Both give the same result however a body is split.
//
// Nothing here is safe for concurrent use unless it says so: a value belongs to one request.
package openai
