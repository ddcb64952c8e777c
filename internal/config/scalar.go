package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes. A document gives it as a whole number or with a
// unit: kB, MB, GB (powers of 1000) or KiB, MiB, GiB (powers of 1024).
type Size int64

// sizeUnits are the suffixes that parseSize knows, the longest match first.
func sizeUnits() []sizeUnit {
	return []sizeUnit{
		{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
		{"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"KB", 1e3}, {"B", 1},
	}
}

type sizeUnit struct {
	suffix string
	bytes  float64
}

// String is the size with the largest binary unit that divides it.
func (s Size) String() string {
	for _, u := range sizeUnits() {
		if strings.Contains(u.suffix, "i") && s != 0 && int64(s)%int64(u.bytes) == 0 {
			return strconv.FormatInt(int64(s)/int64(u.bytes), 10) + u.suffix
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

func parseSize(text string) (Size, error) {
	number, factor := strings.TrimSpace(text), 1.0
	for _, u := range sizeUnits() {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, factor = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	f, err := parseDecimal(number)
	if err != nil {
		return 0, fmt.Errorf("%q is not a size, such as 4MiB, 1GB or 4096", text)
	}
	bytes := f * factor
	if bytes < 0 || bytes > math.MaxInt64/2 || bytes != math.Trunc(bytes) {
		return 0, fmt.Errorf("%q is not a whole number of bytes from 0 to 4EiB", text)
	}
	return Size(bytes), nil
}

func parseDuration(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err == nil {
		return d, nil
	}
	if _, numErr := parseDecimal(text); numErr == nil {
		return 0, fmt.Errorf("%q has no unit: write 500ms, 1s or 1m30s", text)
	}
	return 0, fmt.Errorf("%q is not a duration, such as 500ms, 1s or 1m30s", text)
}

var errNotDecimal = errors.New("not a decimal number")

// parseDecimal accepts plain decimal notation alone: what JSON accepts. Octal,
// hexadecimal, underscores, inf and nan are not numbers in a config, because
// YAML 1.1, YAML 1.2 and JSON disagree about them.
func parseDecimal(text string) (float64, error) {
	digits := strings.TrimPrefix(text, "-")
	if digits == "" || strings.Trim(digits, "0123456789.eE+-") != "" || digits[0] < '0' || digits[0] > '9' {
		return 0, errNotDecimal
	}
	if len(digits) > 1 && digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9' {
		return 0, errNotDecimal
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsInf(f, 0) {
		return 0, errNotDecimal
	}
	return f, nil
}

// parseInt accepts a whole number in decimal notation up to 2^53, where a JSON
// number may have gone through a double on its way here.
func parseInt(text string) (int64, error) {
	f, err := parseDecimal(text)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, fmt.Errorf("%q is not a whole number", text)
	}
	return int64(f), nil
}
