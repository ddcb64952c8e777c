// Package filter is the life of a request, independent of its host: what is
// read of it, who gets it, what a client sees who gets nothing, and the
// bookkeeping at its end. A door, filter/dynmod or filter/golang, translates
// one Envoy extension API to it and decides nothing.
//
// The package also owns the process-wide Runtime: pools with their scrapers and
// discovery, the room of waiting requests, metrics and the admin listeners.
//
// It implements the headers of the llm-d router's endpoint picker and the
// routing of the AIBrix gateway plugin.
package filter
