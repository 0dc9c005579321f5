/*
 * Plain C on the null device: what the posting calls cost without a binding.
 *
 * Prints "NAME NS" lines, with the names of the other workers' cases.  The
 * first argument is the number of runs; the best one is reported.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <infiniband/verbs.h>

#define WORK 65536
#define LONGEST 256

void null_remember(int on);

static struct ibv_qp *qp;
static struct ibv_cq *cq;
static struct ibv_send_wr wrs[LONGEST], *bad;
static struct ibv_recv_wr rwrs[LONGEST], *bad_recv;
static struct ibv_sge sges[LONGEST][4];
static char memory[64];

static const struct {
	const char *name;
	enum ibv_wr_opcode opcode;
} opcodes[] = {
	{ "RDMA_WRITE", IBV_WR_RDMA_WRITE },
	{ "RDMA_WRITE_WITH_IMM", IBV_WR_RDMA_WRITE_WITH_IMM },
	{ "RDMA_READ", IBV_WR_RDMA_READ },
	{ "SEND", IBV_WR_SEND },
	{ "SEND_WITH_IMM", IBV_WR_SEND_WITH_IMM },
	{ "SEND_WITH_INV", IBV_WR_SEND_WITH_INV },
	{ "ATOMIC_CMP_AND_SWP", IBV_WR_ATOMIC_CMP_AND_SWP },
	{ "ATOMIC_FETCH_AND_ADD", IBV_WR_ATOMIC_FETCH_AND_ADD },
	{ "LOCAL_INV", IBV_WR_LOCAL_INV },
	{ "BIND_MW", IBV_WR_BIND_MW },
	{ "SEND (UD)", IBV_WR_SEND },
	{ "TSO (UD)", IBV_WR_TSO },
	{ "RDMA_WRITE (INLINE)", IBV_WR_RDMA_WRITE },
	{ "BIND_MW (key kept)", IBV_WR_BIND_MW },
};

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return ts.tv_sec * 1e9 + ts.tv_nsec;
}

static void build_sges(int i, int n)
{
	for (int s = 0; s < n; s++)
		sges[i][s] = (struct ibv_sge){
			.addr = (uintptr_t)memory + 8 * s, .length = 8, .lkey = 1,
		};
}

static void build(enum ibv_wr_opcode opcode, int length, int n)
{
	for (int i = 0; i < length; i++) {
		build_sges(i, n);
		wrs[i] = (struct ibv_send_wr){
			.wr_id = 7, .opcode = opcode, .sg_list = sges[i],
			.num_sge = n, .send_flags = IBV_SEND_SIGNALED,
			.next = i + 1 < length ? &wrs[i + 1] : NULL,
		};
		/* As long as any opcode's fields. */
		wrs[i].wr.atomic.remote_addr = (uintptr_t)memory;
		wrs[i].wr.atomic.rkey = 1;
		wrs[i].wr.atomic.compare_add = 1;
		wrs[i].wr.atomic.swap = 2;
	}
}

static void build_recv(int length)
{
	for (int i = 0; i < length; i++) {
		build_sges(i, 1);
		rwrs[i] = (struct ibv_recv_wr){
			.wr_id = 7, .sg_list = sges[i], .num_sge = 1,
			.next = i + 1 < length ? &rwrs[i + 1] : NULL,
		};
	}
}

/* Print the best time of `statement`, which handles `each`, after `ready`. */
#define TIME(each, ready, statement, ...)                                     \
	do {                                                                  \
		double least = 1e18;                                          \
		for (int run = 0; run < runs; run++) {                        \
			ready;                                                \
			double start = now();                                 \
			for (int k = 0; k < WORK / (each); k++) {             \
				statement;                                    \
				/* Do not optimize away what is built. */          \
				__asm__ volatile("" ::: "memory");            \
			}                                                     \
			double taken = now() - start;                         \
			if (taken < least)                                    \
				least = taken;                                \
		}                                                             \
		printf(__VA_ARGS__);                                          \
		printf("\t%.2f\n", least / (WORK / (each)) / (each));         \
	} while (0)

static void fill(void)
{
	build(IBV_WR_RDMA_WRITE, 1, 1);
	null_remember(1);
	for (int k = 0; k < WORK; k++)
		ibv_post_send(qp, wrs, &bad);
	null_remember(0);
}

int main(int argc, char **argv)
{
	static const int lengths[] = { 1, 2, 8, 32, 256 };
	int runs = argc > 1 ? atoi(argv[1]) : 5;
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list ? ibv_open_device(list[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC };
	struct ibv_wc wc[16];

	cq = context ? ibv_create_cq(context, 1, NULL, NULL, 0) : NULL;
	init.send_cq = init.recv_cq = cq;
	qp = pd && cq ? ibv_create_qp(pd, &init) : NULL;
	if (!qp)
		return 1;
	for (int i = 0; i < 5; i++)
		for (int n = 1; n <= 4; n += 3)
			TIME(lengths[i], (void)0,
			     build(IBV_WR_RDMA_WRITE, lengths[i], n);
			     ibv_post_send(qp, wrs, &bad),
			     "build/RDMA_WRITE/%d/%d", lengths[i], n);
	for (unsigned int i = 1; i < sizeof(opcodes) / sizeof(*opcodes); i++)
		TIME(1, (void)0, build(opcodes[i].opcode, 1, 1);
		     ibv_post_send(qp, wrs, &bad),
		     "build/%s/1/1", opcodes[i].name);
	for (int length = 1; length <= 32; length += 31) {
		TIME(length, build(IBV_WR_RDMA_WRITE, length, 1),
		     ibv_post_send(qp, wrs, &bad), "prepared/%d", length);
		TIME(length, (void)0, build_recv(length);
		     ibv_post_recv(qp, rwrs, &bad_recv), "recv/%d", length);
	}
	TIME(16, fill(), if (ibv_poll_cq(cq, 16, wc) != 16) return 1, "poll/16");
	return 0;
}
