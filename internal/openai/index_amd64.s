#include "textflag.h"

// Each constant is 32 bytes wide; the SSE2 routine reads the first 16.
#define FILL(name, v) \
	DATA name<>+0(SB)/8, $v \
	DATA name<>+8(SB)/8, $v \
	DATA name<>+16(SB)/8, $v \
	DATA name<>+24(SB)/8, $v \
	GLOBL name<>(SB), RODATA|NOPTR, $32

FILL(quotes, 0x2222222222222222)
FILL(slashes, 0x5c5c5c5c5c5c5c5c)
FILL(controls, 0x1f1f1f1f1f1f1f1f)
FILL(letterR, 0x7272727272727272)

// The bytes that make a simple escape, at their low four bits: '/' b f n t and the backslash at f 2 6 e 4 c. A byte
// is one of them if the table holds it at its own place. 'r' shares b's place, the quote too; they are compared
// apart. Free places hold 0xff, which is at no place: the shuffle gives 0 for bytes from 0x80 on.
DATA simple<>+0(SB)/8, $0xff66ff74ff62ffff
DATA simple<>+8(SB)/8, $0x2f6eff5cffffffff
DATA simple<>+16(SB)/8, $0xff66ff74ff62ffff
DATA simple<>+24(SB)/8, $0x2f6eff5cffffffff
GLOBL simple<>(SB), RODATA|NOPTR, $32

// func indexStopSSE2(p *byte, n int) int
TEXT ·indexStopSSE2(SB), NOSPLIT, $0-24
	MOVQ  p+0(FP), SI
	MOVQ  n+8(FP), CX
	ANDQ  $~63, CX
	XORQ  AX, AX
	MOVOU quotes<>(SB), X12
	MOVOU slashes<>(SB), X13
	MOVOU controls<>(SB), X14
	JMP   next

// STOPS marks in m the bytes of x that end a run of plain string bytes; it clobbers x and t.
#define STOPS(x, t, m) \
	MOVO    x, m; \
	MOVO    x, t; \
	PCMPEQB X12, m; \
	PCMPEQB X13, t; \
	POR     t, m; \
	MOVO    x, t; \
	PMINUB  X14, t; \
	PCMPEQB x, t; \
	POR     t, m

block:
	MOVOU    (SI)(AX*1), X0
	MOVOU    16(SI)(AX*1), X1
	MOVOU    32(SI)(AX*1), X2
	MOVOU    48(SI)(AX*1), X3
	STOPS(X0, X8, X4)
	STOPS(X1, X8, X5)
	STOPS(X2, X8, X6)
	STOPS(X3, X8, X7)
	MOVO     X4, X0
	MOVO     X6, X2
	POR      X5, X0
	POR      X7, X2
	POR      X0, X2
	PMOVMSKB X2, R8
	TESTL    R8, R8
	JNE      found
	ADDQ     $64, AX

next:
	CMPQ AX, CX
	JLT  block
	MOVQ AX, ret+16(FP)
	RET

found:
	PMOVMSKB X4, R8
	PMOVMSKB X5, R9
	PMOVMSKB X6, R10
	PMOVMSKB X7, R11
	SHLQ     $16, R9
	SHLQ     $32, R10
	SHLQ     $48, R11
	ORQ      R9, R8
	ORQ      R11, R10
	ORQ      R10, R8
	BSFQ     R8, R8
	ADDQ     R8, AX
	MOVQ     AX, ret+16(FP)
	RET

// func skipPlainAVX2(p *byte, n int) (pos, escapes int)
//
// Two loops over blocks of 64 bytes. The first only looks whether a block holds nothing but plain bytes. The second
// tells which bytes are escaped (with the arithmetic of simdjson: an odd run of backslashes escapes the byte after
// it, and a carry takes this over a block's end), without a branch on where the escapes are; it is left after eight
// blocks without one.
TEXT ·skipPlainAVX2(SB), NOSPLIT, $0-32
	MOVQ    p+0(FP), SI
	MOVQ    n+8(FP), CX
	ANDQ    $~63, CX
	XORQ    AX, AX                  // position
	XORQ    R8, R8                  // simple escapes
	XORQ    R9, R9                  // 1: the block's first byte is escaped
	MOVQ    $0xaaaaaaaaaaaaaaaa, R15
	VMOVDQU quotes<>(SB), Y8
	VMOVDQU slashes<>(SB), Y9
	VMOVDQU controls<>(SB), Y10
	VMOVDQU simple<>(SB), Y11
	VMOVDQU letterR<>(SB), Y12
	JMP     fastNext

fast:
	VMOVDQU   (SI)(AX*1), Y0
	VMOVDQU   32(SI)(AX*1), Y1
	VPCMPEQB  Y8, Y0, Y2
	VPCMPEQB  Y8, Y1, Y3
	VPMINUB   Y10, Y0, Y4
	VPMINUB   Y10, Y1, Y5
	VPCMPEQB  Y4, Y0, Y4            // control characters
	VPCMPEQB  Y5, Y1, Y5
	VPCMPEQB  Y9, Y0, Y6            // backslashes
	VPCMPEQB  Y9, Y1, Y7
	VPOR      Y4, Y2, Y2            // quotes and control characters
	VPOR      Y5, Y3, Y3
	VPOR      Y6, Y7, Y13
	VPOR      Y2, Y3, Y14
	VPOR      Y13, Y14, Y13
	VPMOVMSKB Y13, DX
	TESTL     DX, DX
	JNE       classify
	ADDQ      $64, AX

fastNext:
	CMPQ AX, CX
	JLT  fast
	JMP  done

block:
	VMOVDQU  (SI)(AX*1), Y0
	VMOVDQU  32(SI)(AX*1), Y1
	VPCMPEQB Y8, Y0, Y2
	VPCMPEQB Y8, Y1, Y3
	VPMINUB  Y10, Y0, Y4
	VPMINUB  Y10, Y1, Y5
	VPCMPEQB Y4, Y0, Y4
	VPCMPEQB Y5, Y1, Y5
	VPCMPEQB Y9, Y0, Y6
	VPCMPEQB Y9, Y1, Y7
	VPOR     Y4, Y2, Y2
	VPOR     Y5, Y3, Y3

classify:
	VPMOVMSKB Y6, R10
	VPMOVMSKB Y7, DX
	SHLQ      $32, DX
	ORQ       DX, R10               // backslashes
	VPMOVMSKB Y2, R11
	VPMOVMSKB Y3, DX
	SHLQ      $32, DX
	ORQ       DX, R11               // quotes and control characters
	VPSHUFB   Y0, Y11, Y6
	VPSHUFB   Y1, Y11, Y7
	VPCMPEQB  Y6, Y0, Y6
	VPCMPEQB  Y7, Y1, Y7
	VPCMPEQB  Y12, Y0, Y0
	VPCMPEQB  Y12, Y1, Y1
	VPOR      Y4, Y6, Y6
	VPOR      Y5, Y7, Y7
	VPOR      Y0, Y6, Y6
	VPOR      Y1, Y7, Y7
	VPMOVMSKB Y6, R12
	VPMOVMSKB Y7, DX
	SHLQ      $32, DX
	ORQ       DX, R12               // simple but the quote, or a control character

	MOVQ R9, R13
	NOTQ R13
	ANDQ R10, R13                   // backslashes that may begin an escape
	LEAQ (R13)(R13*1), DX
	ORQ  R15, DX
	SUBQ R13, DX
	XORQ R15, DX                    // backslashes that begin one, and the bytes after a run
	MOVQ R10, R13
	ORQ  R9, R13
	XORQ DX, R13                    // escaped bytes
	MOVQ DX, R9
	ANDQ R10, R9
	SHRQ $63, R9

	// A quote stops unless it is escaped, a control character always, another byte if it is escaped but not simple.
	// With q, c, s for the three and e for escaped that is (q|c) ^ (e &^ (c|s)): an escaped q meets itself.
	NOTQ    R12
	ANDQ    R13, R12
	XORQ    R11, R12
	JNE     stop
	POPCNTQ R13, R13
	ADDQ    R13, R8
	ADDQ    $64, AX
	DECQ    DI
	TESTQ   R10, R10
	MOVQ    $8, DX
	CMOVQNE DX, DI
	CMPQ    AX, CX
	JGE     done
	TESTQ   DI, DI
	JG      block
	JMP     fast

stop:
	BSFQ    R12, DX
	LEAQ    -1(R12), R10
	NOTQ    R12
	ANDQ    R12, R10                // the bytes before the stop
	ANDQ    R13, R10
	POPCNTQ R10, R10
	ADDQ    R10, R8
	ADDQ    DX, AX
	XORQ    R9, R9
	BTQ     DX, R13
	ADCQ    $0, R9                  // a bad escape is told by its backslash, as is one that is cut

done:
	SUBQ R9, AX
	VZEROUPPER
	MOVQ AX, pos+16(FP)
	MOVQ R8, escapes+24(FP)
	RET

// func unescapeAVX2(dst *byte, room int, src *byte, n int) (read, written int)
//
// Each step copies 32 bytes and then looks how many of them were plain. A step needs the byte after them, too: an
// escape may begin in the last.
TEXT ·unescapeAVX2(SB), NOSPLIT, $0-48
	MOVQ    dst+0(FP), DI
	MOVQ    room+8(FP), R10
	MOVQ    src+16(FP), SI
	MOVQ    n+24(FP), R9
	MOVQ    DI, R12
	MOVQ    SI, R11
	LEAQ    -33(SI)(R9*1), R9       // where the last step may begin to read
	LEAQ    -32(DI)(R10*1), R10     // and to write
	LEAQ    ·unescaped(SB), R13
	VMOVDQU quotes<>(SB), Y8
	VMOVDQU slashes<>(SB), Y9
	VMOVDQU controls<>(SB), Y10
	JMP     unescapeNext

unescapeStep:
	VMOVDQU   (SI), Y0
	VMOVDQU   Y0, (DI)
	VPCMPEQB  Y8, Y0, Y1
	VPCMPEQB  Y9, Y0, Y2
	VPMINUB   Y10, Y0, Y3
	VPCMPEQB  Y3, Y0, Y3
	VPOR      Y1, Y2, Y1
	VPOR      Y1, Y3, Y1
	VPMOVMSKB Y1, AX
	TESTL     AX, AX
	JNE       unescapeStop
	ADDQ      $32, SI
	ADDQ      $32, DI

unescapeNext:
	CMPQ SI, R9
	JHI  unescapeDone
	CMPQ DI, R10
	JLS  unescapeStep

unescapeDone:
	VZEROUPPER
	SUBQ R11, SI
	SUBQ R12, DI
	MOVQ SI, read+32(FP)
	MOVQ DI, written+40(FP)
	RET

unescapeStop:
	BSFL    AX, BX
	ADDQ    BX, SI
	ADDQ    BX, DI
	CMPB    (SI), $0x5c
	JNE     unescapeDone
	MOVBLZX 1(SI), BX
	MOVBLZX (R13)(BX*1), BX
	TESTL   BX, BX
	JEQ     unescapeDone
	MOVB    BX, (DI)
	ADDQ    $2, SI
	INCQ    DI
	JMP     unescapeNext
