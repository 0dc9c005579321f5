/*
 * Plain C on a real device: lists of small RDMA writes, of which the last is signaled.
 *
 * Usage: columns_on_device DEVICE GID_INDEX ROWS ROUNDS
 *
 * Two queue pairs of one process are connected to each other.  Each round builds a list from
 * arrays of offsets, posts it and polls its completion.  Prints, for each line read from standard
 * input, the nanoseconds of a row in one run of that many rounds.
 */
#define _GNU_SOURCE
#include <err.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <infiniband/verbs.h>

#define LONGEST 4096
#define BLOCK 8

static struct ibv_send_wr wrs[LONGEST];
static struct ibv_sge sges[LONGEST];
static uint64_t offsets[LONGEST];
static char memory[2 * LONGEST * BLOCK];

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1e9 + ts.tv_nsec;
}

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	for (int i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			return ibv_open_device(list[i]);
	return NULL;
}

static void connect_to(struct ibv_qp *qp, struct ibv_qp *peer, union ibv_gid gid, int gid_index)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};

	if (ibv_modify_qp(qp, &attr,
			  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		err(1, "INIT");
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qp_num,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1,
			.port_num = 1,
			.grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 64 },
		},
	};
	if (ibv_modify_qp(qp, &attr,
			  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				  IBV_QP_MIN_RNR_TIMER))
		err(1, "RTR");
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 1,
	};
	if (ibv_modify_qp(qp, &attr,
			  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		err(1, "RTS");
}

static void post_and_poll(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mr *mr, int rows)
{
	uint64_t base = (uintptr_t)memory;
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	int found;

	for (int i = 0; i < rows; i++) {
		sges[i] = (struct ibv_sge){
			.addr = base + offsets[i], .length = BLOCK, .lkey = mr->lkey,
		};
		wrs[i] = (struct ibv_send_wr){
			.wr_id = i, .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sges[i], .num_sge = 1,
			.send_flags = i + 1 == rows ? IBV_SEND_SIGNALED : 0,
			.next = i + 1 < rows ? &wrs[i + 1] : NULL,
		};
		wrs[i].wr.rdma.remote_addr = base + sizeof(memory) / 2 + offsets[i];
		wrs[i].wr.rdma.rkey = mr->rkey;
	}
	if (ibv_post_send(qp, wrs, &bad))
		err(1, "ibv_post_send");
	while (!(found = ibv_poll_cq(cq, 1, &wc)))
		;
	if (found < 0 || wc.status)
		errx(1, "poll: %d, %s", found, ibv_wc_status_str(wc.status));
}

int main(int argc, char **argv)
{
	if (argc != 5)
		errx(2, "usage: columns_on_device DEVICE GID_INDEX ROWS ROUNDS");
	struct ibv_context *context = open_device(argv[1]);
	int gid_index = atoi(argv[2]), rows = atoi(argv[3]), rounds = atoi(argv[4]);
	union ibv_gid gid;

	if (!context || rows < 1 || rows > LONGEST || ibv_query_gid(context, 1, gid_index, &gid))
		errx(1, "no such device, GID or number of rows");
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 2 * rows, NULL, NULL, 0);
	struct ibv_mr *mr =
		ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = rows, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *near = ibv_create_qp(pd, &init), *far = ibv_create_qp(pd, &init);

	if (!near || !far || !mr)
		err(1, "resources");
	connect_to(near, far, gid, gid_index);
	connect_to(far, near, gid, gid_index);
	for (int i = 0; i < rows; i++)
		offsets[i] = (uint64_t)BLOCK * ((7 * i) % rows);
	memset(memory, 0x5a, sizeof(memory) / 2);
	while (getchar() != EOF) {
		double start = now();

		for (int i = 0; i < rounds; i++)
			post_and_poll(near, cq, mr, rows);
		printf("%f\n", (now() - start) / rounds / rows);
		fflush(stdout);
	}
	if (memory[sizeof(memory) / 2 + BLOCK * (rows - 1)] != 0x5a)
		errx(1, "the bytes have not arrived");
	return 0;
}
