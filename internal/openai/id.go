package openai

// FNV-1a, by its public definition: a name is all that is needed of an id.
const (
	idSeed  uint64 = 14695981039346656037
	idPrime uint64 = 1099511628211
)

func sumID[T ~string | ~[]byte](sum uint64, b T) uint64 {
	for i := range len(b) {
		sum = (sum ^ uint64(b[i])) * idPrime
	}
	return sum
}

// IDHash names a response's id; it is never 0. [Reader.ID] and [Result.Previous] say the same of an id in a body.
func IDHash(id string) uint64 { return sumID(idSeed, id) | 1 }
