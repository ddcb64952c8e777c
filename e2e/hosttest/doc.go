// Package hosttest tests golanghost, the host in which the plugin for Envoy's golang filter is tested: that what the real
// filter allows works in it, that each misuse the real filter punishes ends the process with a message that names it, and
// that its tables are those of the SDK's sources.
package hosttest
