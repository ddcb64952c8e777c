//go:build !amd64

package openai

func checkBlocks([]byte) error { return nil }
